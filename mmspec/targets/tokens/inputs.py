"""The tensors of a request, looked at before any forward: their kind, shape and range."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

IDS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "decoder_input_ids")
AXES = {**dict.fromkeys(IDS, 2), "inputs_embeds": 3}
SHAPES = {2: "(rows, tokens)", 3: "(rows, tokens, width)"}
# what is not of a prompt's tokens
BESIDE = ("pixel_", "input_features", "input_values", "audio_", "caption", "source_")
MEDIA = ("pixel_values", "pixel_values_videos", "input_features", "caption", "caption_mask")


def check_inputs(
    inputs: Mapping[str, Any],
    vocabulary: int | None = None,
    beyond: Collection[int] = (),
    device: torch.device | None = None,
) -> None:
    """Refuse tensors that no forward can read. Raises ValueError naming the first one.

    Ids lie within the `vocabulary` or are one of `beyond` (placeholders of pictures); a mask holds
    zeros and ones, as many as there are tokens; everything has as many rows.
    """
    given = {name: value for name, value in inputs.items() if value is not None}
    for name in (*AXES, *MEDIA):
        if name in given:
            _check_kind(name, given[name])
    ids = given.get("input_ids", given.get("inputs_embeds"))
    if ids is None:
        _check_mask("caption_mask", given.get("caption_mask"))
        return
    if device is not None and ids.device.type != device.type:
        raise ValueError(
            f"input_ids lie on {ids.device}, but the model on {device}; pass inputs.to({device})"
        )
    if "input_ids" in given and vocabulary is not None:
        _check_range(ids, vocabulary, beyond)
    for name in ("attention_mask", "token_type_ids", "mm_token_type_ids"):
        if name in given and given[name].shape != ids.shape[:2]:
            raise ValueError(
                f"{name} has shape {tuple(given[name].shape)}, but the prompt "
                f"{tuple(ids.shape[:2])}; pass what the processor makes of one and the same text"
            )
    _check_mask("attention_mask", given.get("attention_mask"))


def leading(attention_mask: Tensor | None, batch: int) -> list[int]:
    """Left padding per row; raises ValueError for padding on the right."""
    if attention_mask is None:
        return [0] * batch
    if not bool(attention_mask[:, -1].all()):
        raise ValueError(
            "attention_mask (given, or told by the padding token) hides tokens after a prompt; pad "
            "on the left (processor.tokenizer.padding_side = 'left')"
        )
    pads: list[int] = (attention_mask.cumsum(-1) == 0).sum(-1).tolist()
    return pads


def padding(attention_mask: Tensor | None, batch: int) -> list[int]:
    """The same; raises ValueError for padding between tokens, too."""
    pads = leading(attention_mask, batch)
    if attention_mask is not None and int((attention_mask == 0).sum()) != sum(pads):
        raise ValueError(
            "attention_mask hides tokens inside a prompt, which cannot be left out here; drop them "
            "and pad on the left"
        )
    return pads


def words(reader: Any, count: int, inputs: Mapping[str, Any] | None = None) -> list[int]:
    """Ids that stand for words, as many different ones as there are; those of a request first."""
    ids = None if inputs is None else inputs.get("input_ids")
    given = [] if ids is None else ids[-1].flip(0).tolist()
    special = control_ids(reader)
    others = range(5, reader.vocabulary, 7)
    found = [token for token in dict.fromkeys((*given, *others)) if token not in special]
    return [found[step % len(found)] for step in range(count)]


def control_ids(reader: Any) -> frozenset[int]:
    """Ids that frame what is said: beginning, end, padding, and those of pictures."""
    found, model = set(reader.visual_ids), reader.model
    for config in (reader.config, *([model.generation_config] if model.can_generate() else [])):
        for kind in ("pad", "bos", "eos", "decoder_start"):
            value = vars(config).get(f"{kind}_token_id")
            found |= set(value) if isinstance(value, list) else {value}
    return frozenset(found - {None})


def lengthened(reader: Any, inputs: Mapping[str, Any], ids: Tensor) -> dict[str, Any]:  # (B, n)
    """The same request with words behind its prompt: what else it says of its tokens goes on.

    Pictures and sounds stay, also where they happen to be as long as the prompt.
    """
    longer = {name: value for name, value in inputs.items() if name != "position_ids"}
    is_told = inputs.get("input_ids") is not None
    prompt = inputs["input_ids" if is_told else "inputs_embeds"]
    for name, value in longer.items():
        if not isinstance(value, Tensor) or value.dim() < 2 or name.startswith(BESIDE):
            continue
        is_seen = value.dim() > 2 and value.is_floating_point()
        if value.shape[:2] == prompt.shape[:2] and not is_seen:
            last = value[:, -1:].expand(-1, ids.shape[1], *value.shape[2:])
            longer[name] = torch.cat((value, last), 1)
    if is_told:
        longer["input_ids"] = torch.cat((prompt, ids), 1)
    else:
        longer["inputs_embeds"] = torch.cat((prompt, reader.embed(ids).to(prompt)), 1)
    return longer


def _check_mask(name: str, mask: Tensor | None) -> None:
    if mask is not None and not bool(((mask == 0) | (mask == 1)).all()):
        odd = mask[(mask != 0) & (mask != 1)].flatten()[0].item()
        raise ValueError(f"{name} holds {odd}; give 1 for tokens that are read and 0 for padding")


def _check_kind(name: str, value: Any) -> None:
    """A tensor of so many axes, of whole numbers where they are ids."""
    if name in MEDIA and isinstance(value, list | tuple) and value:
        for one in value:  # pictures of different sizes
            _check_kind(name, one)
        return
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{name} is a {type(value).__name__}, no tensor; pass what the model's processor makes "
            'with return_tensors="pt"'
        )
    axes = AXES.get(name)
    if axes is not None and value.dim() != axes:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}; give {SHAPES[axes]}, also of a single row"
        )
    is_whole = value.dtype in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
    if name.endswith("ids") and not is_whole:
        raise ValueError(f"{name} are {value.dtype}; give ids as whole numbers, torch.int64")
    if value.is_complex() or value.is_meta:
        raise ValueError(f"{name} is {value.dtype} on {value.device}; give real numbers in memory")
    if not value.shape[0]:
        raise ValueError(f"{name} has no rows; give one per prompt")
    if name in MEDIA and not bool(torch.isfinite(value).all()):
        raise ValueError(
            f"{name} holds NaN or infinite numbers; check what it was made of, or make it with the "
            "model's processor"
        )


def _check_range(ids: Tensor, vocabulary: int, beyond: Collection[int]) -> None:
    wrong = (ids < 0) | (ids >= vocabulary)
    for known in beyond:
        wrong &= ids != known
    if bool(wrong.any()):
        raise ValueError(
            f"input_ids hold {ids[wrong][0].item()}, but the model has {vocabulary} tokens; "
            "make them with the model's own processor"
        )
