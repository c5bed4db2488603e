"""One request of several: prompts that are read together, padded on the left to one length.

    a b c          . . a b c
    d e f g h      d e f g h
    i j            . . . i j

Each row keeps its own settings, noise and limit. Images and other media are concatenated in the
order of the rows. Whether a model then reads each prompt as alone is compared when it first does
(`mmspec.serving.prompts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmspec import _hf
from mmspec.targets.tokens.context import BESIDE, IDS, Request
from mmspec.targets.tokens.rows import RowSampling

PADDED = frozenset(IDS) - {"decoder_input_ids"}  # one value per token; the padding is 0


def find_merge_obstacle(request: Request, model: Any) -> str | None:
    """Why a request of one row is read alone; None if others may be read with it."""
    inputs = _given(request.inputs)
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if request.past is not None:
        return "it continues an earlier turn"
    if request.drafter_inputs or request.shared:
        return "it has inputs of its own for the drafter"
    if not isinstance(ids, Tensor):
        return "its prompt is given as embeddings"
    if mask is None:
        mask = _hf.infer_mask(model, ids)
    if mask is not None and not bool(mask.all()):
        return "its attention_mask hides tokens"
    for name, value in inputs.items():
        if name in PADDED:
            continue
        if not isinstance(value, Tensor):
            return f"{name} is a {type(value).__name__}"
        is_beside = name.startswith(BESIDE) or name in _MEDIA_SIZES
        if not is_beside and value.dim() > 1 and value.shape[1] == ids.shape[1]:
            return f"{name} may hold one value per token"
    return None


def merge_key(request: Request) -> tuple[Any, ...]:
    """What requests have in common that may be read together: names, types and shapes of media."""
    inputs = _given(request.inputs)
    media = [
        (name, value.dtype, tuple(value.shape[1:]))
        for name, value in inputs.items()
        if name not in PADDED
    ]
    per_token = inputs.keys() & PADDED - {"attention_mask"}
    return (request.sampling.do_sample, tuple(sorted(per_token)), tuple(sorted(media, key=str)))


def merge_requests(requests: Sequence[Request], filler: int) -> Request:
    """One request of the rows of all, which have the same `merge_key` and no obstacle.

    `filler` is the id of masked slots: one of a word, as placeholders are counted.
    """
    first = requests[0]
    if len(requests) == 1:
        return first
    prompts = [one.inputs["input_ids"] for one in requests]
    length = max(ids.shape[1] for ids in prompts)
    inputs: dict[str, Any] = {
        "attention_mask": _pad([torch.ones_like(ids) for ids in prompts], length, 0)
    }
    for name in _given(first.inputs):
        values = [one.inputs[name] for one in requests]
        if name == "input_ids":
            inputs[name] = _pad(prompts, length, filler)
        elif name in PADDED - {"attention_mask"}:
            inputs[name] = _pad(values, length, 0)
        elif name != "attention_mask":
            inputs[name] = torch.cat(values)
    noise = first.noise
    for one in requests[1:]:
        noise = noise.join(one.noise, 0)
    limits = tuple(one.max_new_tokens for one in requests)
    sampling: Any = RowSampling(tuple(one.sampling for one in requests))
    return replace(
        first,
        inputs=inputs,
        sampling=sampling,
        noise=noise,
        max_new_tokens=max(limits),
        row_limits=limits,
        is_merged=True,
    )


_MEDIA_SIZES = frozenset({"image_sizes", "image_grid_thw", "video_grid_thw", "second_per_grid_ts"})


def _given(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if value is not None}


def _pad(rows: Sequence[Tensor], length: int, value: int) -> Tensor:  # (1, n) each -> (B, length)
    padded = [torch.nn.functional.pad(row, (length - row.shape[1], 0), value=value) for row in rows]
    return torch.cat(padded)
