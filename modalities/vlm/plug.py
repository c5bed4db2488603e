"""Text and vision-language models of transformers: `generate`.

Some models read a picture and leave the words to a part: the `generate()` of BLIP, BLIP-2,
InstructBLIP and Kosmos-2 encodes, and calls `generate()` of one of its parts. That part is bound,
and the model's own `generate()` runs as it is, with the hook of transformers in that call.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import GenerationMixin

from mmspec import zoo
from mmspec.modalities import tokens
from mmspec.modalities.families import reader
from mmspec.modalities.text import Output, Text, placed
from mmspec.modality import Loop
from mmspec.models.loading import load_causal
from mmspec.recipe import Recipe
from mmspec.targets.generation_settings import sampled


class LanguageSession(tokens.TokenSession):
    """A causal or encoder-decoder model bound to a recipe."""

    calls = ("generate", "__call__")

    def __init__(self, bound: tokens.BoundTokens) -> None:
        super().__init__(bound)
        self.text = Text(bound)
        self.signature = self.text.signature

    def run(self, call: str, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop) -> Any:
        asked = self.text.generate if call == "generate" else self.text.hook
        return asked(args, arguments, loop)


class WholeSession(LanguageSession):
    """A model whose part was bound."""

    def __init__(self, bound: tokens.BoundTokens, whole: Any) -> None:
        super().__init__(bound)
        self.model = whole

    def run(self, call: str, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop) -> Any:
        if call != "generate":
            return super().run(call, args, arguments, loop)
        given = {name: one for name, one in placed(args, arguments).items() if one is not None}
        refused = sorted({"row_ids", "streamer", "past_key_values"} & given.keys())
        if refused:
            raise ValueError(
                f"{', '.join(refused)} cannot be given to {type(self.model).__name__}, whose words "
                f"come from its {type(self.bound.model).__name__}; leave it out (stream() hands "
                "out tokens as they come)"
            )
        told = {name: one for name, one in given.items() if name in ("input_ids", "attention_mask")}
        self.text.check(told)  # the part may get its own encoding of these
        hook = _PartHook(self, loop)
        found = self.model.generate(**sampled(given), custom_generate=hook)
        if not hook.count == 1:
            raise ValueError(
                f"{type(self.model).__name__}.generate() asked its "
                f"{type(self.bound.model).__name__} {hook.count} times where once was meant; "
                "accelerate that part by itself"
            )
        if not hasattr(found, "sequences"):
            return Output(found, loop.stats())
        rest = {name: getattr(found, name, None) for name in ("scores", "logits")}
        return Output(found.sequences, loop.stats(), **rest, past_key_values=found.past_key_values)


class _PartHook:
    """The hook of one request."""

    def __init__(self, session: WholeSession, loop: Loop) -> None:
        self.session, self.loop, self.count = session, loop, 0
        self.__signature__ = session.signature  # what transformers looks at

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        self.count += 1
        return self.session.text.hook(args, arguments, self.loop)


def session(model: Any, recipe: Recipe, drafter: Any, parts: Mapping[str, Any]) -> LanguageSession:
    """A model bound to a recipe. Raises ValueError for parts that do not fit."""
    part = speaking_part(model)
    bound = tokens.bind(reader(model if part is None else part), recipe, drafter, parts)
    return LanguageSession(bound) if part is None else WholeSession(bound, model)


def speaking_part(model: Any) -> Any | None:
    """The part whose `generate()` the model's own one calls; None for models that generate.

    Told by the class: it replaces `generate()`, not the steps of transformers' loop, and names one
    part that generates. `WholeSession` sees at each request whether that part was asked.
    """
    kind = type(model)
    if not _generates(model) or kind.generate is GenerationMixin.generate:
        return None
    steps = GenerationMixin.prepare_inputs_for_generation
    named = inspect.unwrap(kind.generate).__code__.co_names
    if kind.prepare_inputs_for_generation is not steps or "super" in named:
        return None
    found = [part for name, part in model.named_children() if name in named and _generates(part)]
    return found[0] if len(found) == 1 else None


def _generates(model: Any) -> bool:
    return isinstance(model, GenerationMixin)


def load(source: str | Path, **options: Any) -> Any:
    """A model from a folder, a hub name, or "zoo:NAME"."""
    name = str(source)
    if name.startswith("zoo:"):
        return zoo.load(name.removeprefix("zoo:"))
    return load_causal(name, **options)
