"""What the parts of a round may know about the request being decoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mmspec.distributions.noise import KeyedNoise
from mmspec.distributions.sampling import Sampling
from mmspec.draft import Draft, Scores
from mmspec.targets.memory import Memory, RowMemories
from mmspec.targets.tokens.turns import EarlierTurns


@dataclass(frozen=True)
class Request:
    """One `generate` call: the processor's tensors and how to decode."""

    inputs: Mapping[str, Any]
    sampling: Sampling
    noise: KeyedNoise
    room: int  # most new tokens per row
    drafter_inputs: Mapping[str, Any] = field(default_factory=dict)  # what the drafter gets instead
    shared: Mapping[str, Any] = field(default_factory=dict)  # what the call itself offers drafters
    past: EarlierTurns | None = None  # the cache of an earlier turn that this one goes on from


@dataclass(frozen=True)
class Context:
    """Everything committed so far, per row, and what is still waiting to be read by the target."""

    request: Request
    history: tuple[list[int], ...]  # committed tokens that are known, prompt included, no padding
    prompt: tuple[int, ...]  # of them the prompt's, per row
    padding: tuple[int, ...]  # slots per row that nobody sees
    vocabulary: int  # the target's
    memory: Memory | RowMemories  # the target's; an `Unread` stands for it till it is read
    noise: KeyedNoise  # this round's
    scores: Scores | None = None  # the distribution after the prompt, until its token is chosen
    shared: Mapping[str, Any] = field(default_factory=dict)  # what target and call offer drafters
    finished: tuple[bool, ...] = ()
    skipped: int = 0  # rounds since the target was asked last; their tokens are pending
    unknown: tuple[int, ...] = ()  # per row, before the history: read as embeddings, or in a turn
    # whose tokens were not given again

    @property
    def batch(self) -> int:
        return len(self.history)

    @property
    def device(self) -> torch.device:
        return self.noise.rows.device

    @property
    def sampling(self) -> Sampling:
        return self.request.sampling

    @property
    def lengths(self) -> tuple[int, ...]:
        """Committed tokens per row: the absolute position of the next one."""
        before = self.unknown or (0,) * self.batch
        return tuple(len(row) + more for row, more in zip(self.history, before, strict=True))

    def generated(self, row: int) -> int:
        """New tokens of a row so far."""
        return len(self.history[row]) - self.prompt[row]

    @property
    def pending(self) -> tuple[int, ...]:
        """How many of the last tokens the target has not kept in its memory yet, per row."""
        rows = zip(self.lengths, self.padding, self.memory.kept, strict=True)
        return tuple(length + pad - kept for length, pad, kept in rows)

    def waiting(self) -> list[list[int]]:
        """The pending tokens per row.

        A finished row repeats its last one, so that all rows have some.
        """
        counts = [max(count, 1) for count in self.pending]
        return [row[len(row) - count :] for row, count in zip(self.history, counts, strict=True)]

    def position(self) -> Tensor:  # (B, 1)
        """Absolute position of the next token, on the device."""
        return torch.tensor([[length] for length in self.lengths], device=self.device)

    def emitted(self) -> list[list[int]]:
        """New tokens per row so far."""
        return [line[start:] for line, start in zip(self.history, self.prompt, strict=True)]

    def nothing(self) -> Draft:
        """A draft without a node."""
        return Draft.empty(self.batch, self.device)

    def prefix(self, row: int) -> Tensor:  # (L,)
        """Tokens of a row as a logits processor sees them: the prompt as given, padding included.

        A prompt of embeddings has none.
        """
        ids = self.request.inputs.get("input_ids")
        given = [] if ids is None else ids[row].tolist()
        new = self.history[row][self.prompt[row] :]
        return torch.tensor(given + new, dtype=torch.int64, device=self.device)

    def at_round(self, index: int) -> Context:
        return replace(self, noise=self.noise.at_round(index))
