"""Bind the arguments of `generate` and of the custom_generate hook by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mmspec import _hf_cache

HOOK_ARGUMENTS = (
    "seed",
    "row_ids",
    "drafter_inputs",
    "trace",
    "grammar",
)  # in addition to those of transformers


def make_hook_signature(media: Sequence[str] = ()) -> inspect.Signature:
    """Return the signature of the hook: transformers passes named arguments unchanged.

    Media are named so that the hook gets them and not their encoding: a draft model with its own
    encoder needs them.
    """
    names = ("logits_processor", "stopping_criteria", "generation_config")
    either, named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, either) for name in ("model", "input_ids")]
    parameters += [
        inspect.Parameter(name, named, default=None) for name in (*names, *HOOK_ARGUMENTS, *media)
    ]
    rest = inspect.Parameter("model_kwargs", inspect.Parameter.VAR_KEYWORD)
    return inspect.Signature([*parameters, rest])


HOOK = make_hook_signature()


def bind_hook(args: Sequence[Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the hook by name. Raises ValueError for a call that is not its own."""
    try:
        given = HOOK.bind(*args, **arguments).arguments
    except TypeError:
        given = {}
    if not isinstance(given.get("input_ids"), Tensor) or given.get("generation_config") is None:
        raise ValueError(
            "calling this object is the custom_generate hook, whose arguments transformers makes; "
            "call generate(**inputs), or model.generate(**inputs, custom_generate=...) with it"
        )
    return given


def bind_arguments(
    args: Sequence[Any], arguments: Mapping[str, Any], name: str = "input_ids"
) -> dict[str, Any]:
    """Return arguments by name; the main input may be positional, as in `model.generate(ids)`.

    A cache is called `past_key_values`, whichever of its names was given. Raises ValueError for
    two caches and for further positional arguments.
    """
    given = _hf_cache.name_cache(arguments, "past_key_values")
    if not args:
        return given
    if len(args) > 1 or name in given:
        raise ValueError(
            f"generate() takes {name} by position, once, and everything else by name; give "
            "generate(**inputs)"
        )
    return {name: args[0], **given}
