"""A long prompt of one row, read in chunks, so that other requests run between them.

The first chunk holds the images, which the model reads as in any prompt; later ones are blocks
after it, of text. States that the drafter needs are joined, so the context is that of a prompt
read as a whole, up to rounding.

    image image image a b c d | e f g h | i j        size 4
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmspec.targets.memory import TokenBlock
from mmspec.targets.readers.attention_tap import ATTENTION_FEATURES
from mmspec.targets.readers.backbone import Backbone
from mmspec.targets.slots import Mask
from mmspec.targets.tokens.causal import CausalTarget
from mmspec.targets.tokens.context import Context, Request
from mmspec.targets.tokens.merge import PADDED, find_merge_obstacle

TOKEN_AXIS = {"states": 2, "positions": -1}  # of recorded states; of others 1
UNRECORDED = ATTENTION_FEATURES | {"ctc", "source"}  # of a prompt as a whole


class ChunkedPrompt:
    """A prompt that is read by calls of `step`, of at most `size` slots after its images."""

    def __init__(self, target: CausalTarget, request: Request, size: int) -> None:
        self.target, self.request, self.size = target, request, size
        self.ids = request.inputs["input_ids"]  # (1, L)
        self.read = 0  # tokens
        self.memory: Any = None
        self.offers: list[dict[str, Any]] = []

    @staticmethod
    def find_obstacle(target: CausalTarget, request: Request, size: int) -> str | None:
        """Why a prompt is read as a whole; None if it can be read in chunks."""
        reader, features = target.backbone, target.required_features
        if not isinstance(reader, Backbone) or not reader.can_branch or reader.stepwise:
            return f"{type(reader.model).__name__} is read row by row"
        if target.defers_prefill:
            return "its first token is drafted before the prompt is read"
        if features & UNRECORDED:
            return f"the drafter needs {min(features & UNRECORDED)} of the whole prompt"
        if reader.border is not None:
            return "its rotary positions depend on the length of the prompt"
        if (reason := find_merge_obstacle(request, reader.model)) is not None:
            return reason
        first = _first_chunk(reader, request.inputs["input_ids"], size)
        if any(bool(request.inputs[name][:, first:].any()) for name in _types(request)):
            return "it has token types after its images"
        return None

    def step(self) -> Context | None:
        """Read the next chunk; the context of the prompt after the last one."""
        target, ids = self.target, self.ids
        length = ids.shape[1]
        if self.memory is None:
            self.read = _first_chunk(target.backbone, ids, self.size)
            offer = dict[str, Any](self.request.shared)
            self.memory, logits = target.run_prefill(self._cut(), offer)
        else:
            chunk = ids[:, self.read : self.read + self.size]
            self.read += chunk.shape[1]
            logits, offer = self._read_block(chunk)
        self.offers.append(offer)
        if self.read < length:
            return None
        if len(self.offers) > 1:  # the mask has a line per slot of a chunk
            self.memory.mask = Mask((0,), length, self.memory.like)
        return target.open_context(self.request, self.memory, logits, self._join_offers())

    def _cut(self) -> Request:
        """The request of the first chunk, with room for all."""
        inputs = {
            name: value[:, : self.read] if name in PADDED and value is not None else value
            for name, value in self.request.inputs.items()
        }
        room = self.request.max_new_tokens + self.ids.shape[1] - self.read
        return replace(self.request, inputs=inputs, max_new_tokens=room)

    def _read_block(self, tokens: Tensor) -> tuple[Tensor, dict[str, Any]]:  # (1, n)
        """Logits (1, V) after a chunk, and the states of its tokens; it is committed."""
        reader, count = self.target.backbone, tokens.shape[1]
        assert isinstance(reader, Backbone)
        depths = torch.arange(count, device=tokens.device)[None]
        corner = torch.ones(1, count, count, dtype=torch.bool, device=tokens.device).tril()
        block = TokenBlock(tokens, depths, corner, waiting=count)
        with self.target.record_states() as offer:
            logits, _ = reader.read_eager(self.memory, block)
        self.memory.advance([count])
        return logits[:, -1], offer

    def _join_offers(self) -> Mapping[str, Any]:
        """The states of all chunks, as of one forward."""
        first, *others = self.offers
        if not others:
            return first
        joined = dict(first)
        for name in others[0]:
            parts = [offer[name] for offer in self.offers]
            if name == "positions" and parts[0] is not None:  # a prompt may have one of text order
                parts = [one[-min(map(len, parts)) :] for one in parts]
            if parts[0] is not None:
                joined[name] = torch.cat(parts, TOKEN_AXIS.get(name, 1))
        return joined


def _first_chunk(reader: Any, ids: Tensor, size: int) -> int:
    """Tokens of the first chunk: up to the last one of an image, at least `size`."""
    visual = torch.isin(ids[0], torch.tensor(reader.visual_ids, device=ids.device))
    ends = visual.nonzero()[:, 0]
    last = int(ends[-1]) + 1 if len(ends) else 0
    return min(max(size, last), ids.shape[1])


def _types(request: Request) -> list[str]:
    names = PADDED - {"input_ids", "attention_mask"}
    return [name for name in names if request.inputs.get(name) is not None]
