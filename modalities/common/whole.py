"""Models with a `generate()` of their own: it runs as it is, with our hook where the loop would be.

Some prepare a request for the loop of transformers, or work on what that gives: Granite-Speech,
Seamless M4T, the stages of Bark. Others read a picture and leave the words to a part: the
`generate()` of BLIP, BLIP-2, InstructBLIP and Kosmos-2 encodes, and calls that of one of its parts,
which is then what is bound.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import GenerationMixin

from mmspec import _hf
from mmspec.modalities.common.text import Output, Text
from mmspec.modality import Loop
from mmspec.targets.tokens.generation_settings import check_parts, check_values, sampled

BESIDE = ("output_scores", "output_logits")  # what settings ask for beside the tokens


def speaking_part(model: Any) -> Any | None:
    """The part whose loop the model's own `generate()` enters, which may be the model itself.

    None for models that have no `generate()` of their own. Told by the class: a part speaks where
    `generate()` is replaced, but not the steps of transformers' loop, and names one part that
    generates. `generate` sees at each request whether that part was asked.
    """
    kind = type(_hf.uncompiled(model))
    if not issubclass(kind, GenerationMixin) or kind.generate is GenerationMixin.generate:
        return None
    steps = GenerationMixin.prepare_inputs_for_generation
    named = inspect.unwrap(kind.generate).__code__.co_names
    if kind.prepare_inputs_for_generation is not steps or "super" in named:
        return model
    parts = [part for name, part in model.named_children() if name in named]
    found = [part for part in parts if isinstance(part, GenerationMixin)]
    return found[0] if len(found) == 1 else model


def generate(model: Any, text: Text, arguments: Mapping[str, Any], loop: Loop) -> Output:
    """`model.generate(**arguments)`, in which `text` answers for the part that it is bound to.

    Raises ValueError for what cannot pass through it, and where it enters the loop not once.
    """
    given = {name: one for name, one in arguments.items() if one is not None}
    check_parts(given)
    check_values(given)
    whole, part = type(model).__name__, type(text.bound.model).__name__
    if model is not text.bound.model:
        refused = sorted({"row_ids", "streamer", "past_key_values"} & given.keys())
        if refused:
            raise ValueError(
                f"{', '.join(refused)} cannot be given to {whole}, whose words come from its "
                f"{part}; leave it out (stream() hands out tokens as they come)"
            )
    told = {name: one for name, one in given.items() if name in ("input_ids", "attention_mask")}
    text.check(told)  # the part may get its own encoding of these
    said = {name: given[name] for name in BESIDE if name in given}
    config = _hf.merge_config(text.bound.model, given.get("generation_config"), said)
    if config.output_scores or config.output_logits or "past_key_values" in given:
        given["return_dict_in_generate"] = True
    hook = _Hook(text, loop, given.pop("streamer", None))
    found = model.generate(**sampled(given), custom_generate=hook)
    if hook.count != 1:
        raise ValueError(
            f"{whole}.generate() entered the loop of its {part} {hook.count} times where once was "
            "meant, so what it does cannot be accelerated; use model.generate(), or accelerate a "
            "part of the model by itself"
        )
    if isinstance(found, Tensor):
        return Output(found, loop.stats())
    rest = {name: getattr(found, name, None) for name in ("scores", "logits", "past_key_values")}
    return Output(found.sequences, loop.stats(), **rest)


class _Hook:
    """The hook of one request."""

    def __init__(self, text: Text, loop: Loop, streamer: Any) -> None:
        self.text, self.loop, self.streamer, self.count = text, loop, streamer, 0
        self.__signature__ = text.signature  # what transformers looks at

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        self.count += 1
        return self.text.hook(args, arguments, self.loop, self.streamer)
