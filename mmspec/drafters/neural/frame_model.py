"""Drafting audio frames with a smaller model of the same codebooks."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import Keys, Lane, Noise
from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.errors import format_value
from mmspec.models.loading import random_model
from mmspec.recipe import DraftModelKind, Kit
from mmspec.targets.frames.frame_distributions import (
    Draw,
    FrameDistribution,
    ParallelDistribution,
    keyed_draw,
)
from mmspec.targets.frames.frames import FrameMemory, FrameReader, Frames, Outputs, make_scores


@dataclass
class _FrameState:
    """The state of a request."""

    memories: list[FrameMemory]
    last: list[Outputs]  # after the prompt, until a frame was read


@dataclass(frozen=True)
class FrameModel(Drafter):
    """Draws a chain of at most `length` frames, with the target's noise or with noise of its own.

    It reads the target's prompt, and is guided as the target is.
    """

    reader: FrameReader
    length: int
    kinds: tuple[Kind, ...] = (Kind.RACE, Kind.IID)
    sees: ClassVar[str] = "prompt"
    reads_prompt: ClassVar[bool] = True

    def with_kind(self, kind: Kind) -> Drafter:
        return FrameModel(self.reader, self.length, (kind,))

    def begin(self, context: Frames) -> _FrameState:
        return _FrameState(*self.reader.begin(context.request.inputs, context.request.settings))

    def propose(self, context: Frames, state: _FrameState) -> Draft:
        count = min(self.length, context.max_draft_frames)
        if not count:
            return context.empty_draft()
        kind = self.kinds[0]
        outputs, drafted = self._catch_up(context, state), context.empty_draft().tokens
        distributions: list[FrameDistribution] = []
        for step in range(count):
            distribution = make_scores(self.reader, outputs, context, drafted).distribution[:, 0]
            frame, recorded_distributions = _draw_frame(
                distribution, _sampler(kind, context.noise, context.steps[:, 0] + step, step)
            )
            drafted = torch.cat((drafted, frame[:, None]), 1)
            distributions.append(recorded_distributions)
            if step + 1 < count:
                outputs = self._read(context, state, frame, step)
        record = None if kind is Kind.RACE else _join_frames(distributions)
        return Draft.chain(drafted, kind, record)

    def observe(
        self, context: Frames, state: _FrameState, draft: Draft, scores: Scores, round_: Round
    ) -> _FrameState:
        for row, memory in enumerate(state.memories):
            accepted = min(round_.accepted[row], max(draft.nodes - 1, 0))
            now = len(context.history[row]) - len(round_.tokens[row])
            if not context.finished[row] and draft.nodes:
                memory.frames = now + accepted
        return state

    def _catch_up(self, context: Frames, state: _FrameState) -> list[Outputs]:
        """Read the frames emitted since; returns the outputs after them, per row."""
        for row, memory in enumerate(state.memories):
            if context.finished[row] or memory.frames == len(context.history[row]):
                continue
            frames = context.unread_frames(row, memory)
            memory.plan(len(frames))
            state.last[row] = tuple(one[-1:] for one in self.reader.read(memory, frames))
            memory.frames += len(frames)
        return state.last

    def _read(self, context: Frames, state: _FrameState, frame: Tensor, step: int) -> list[Outputs]:
        """Read a drafted frame of every row, which is not cached yet."""
        found = list[Outputs]()
        for row, memory in enumerate(state.memories):
            if context.finished[row]:
                found.append(())
                continue
            memory.cache.plan_uniform(memory.prompt + memory.frames + step, 1)
            found.append(self.reader.read(memory, frame[row][None]))
        return found


def _sampler(kind: Kind, noise: Any, steps: Tensor, step: int) -> Draw:
    """Sampler of codes with the noise of their position, or with noise of the drafter's own."""
    if kind is Kind.RACE:
        return keyed_draw(Keys(noise.shared_keys(steps[:, None]).key[:, 0]))
    own: Noise = noise
    index = torch.tensor([step], device=steps.device)
    return keyed_draw(Keys(own.fresh_keys(Lane.DRAFT, index).key[:, 0]))


def _draw_frame(distribution: FrameDistribution, draw: Draw) -> tuple[Tensor, ParallelDistribution]:
    """A frame per row (B, K), and the distributions that its codes were drawn from."""
    recorded_distributions: list[Categorical] = []

    def record(one: Categorical, book: int) -> Tensor:
        recorded_distributions.append(one)
        return draw(one, book)

    blank = distribution.fixed_codes.clamp_min(0)
    frame = distribution.complete(blank, torch.zeros_like(blank[:, 0]), record)
    return frame, ParallelDistribution(
        Categorical.stack(recorded_distributions), distribution.fixed_codes
    )


def _join_frames(distributions: list[FrameDistribution]) -> ParallelDistribution:
    """Recorded distributions of consecutive frames, (B, N)."""
    codes = Categorical.stack(
        [
            distribution.codes
            for distribution in distributions
            if isinstance(distribution, ParallelDistribution)
        ]
    )
    return ParallelDistribution(
        codes, torch.stack([distribution.fixed_codes for distribution in distributions], 1)
    )


@dataclass(frozen=True)
class _FrameModelKind(DraftModelKind):
    """A model of the target's own class, with its codebooks."""

    description: ClassVar[str] = "draft model"

    def accepts(self, model: Any) -> bool:
        return isinstance(model, torch.nn.Module)

    def owns(self, folder: Path) -> bool:
        return (folder / "config.json").is_file()

    def load(self, source: str | Path, target: Any, dtype: torch.dtype | None = None) -> Any:
        model: Any = type(target.model)
        return model.from_pretrained(
            str(source), dtype=dtype or target.model.dtype, use_safetensors=True
        ).eval()

    def read(self, model: Any, target: Any, sees: str) -> FrameReader:
        small: FrameReader = target.like(model)
        if (small.books, small.size) != (target.books, target.size):
            raise ValueError(
                f"the draft model has {small.books} codebooks of {small.size} codes, the target "
                f"{target.books} of {target.size}; give one of the same codec"
            )
        return small

    def random(self, target: Any, seed: int) -> Any:
        config, maker = deepcopy(target.model.config), type(target.model)
        return random_model(lambda: maker(config), seed)


FRAME_MODEL = _FrameModelKind()


def frame_model(kit: Kit) -> Drafter:
    """A smaller model of the same codebooks."""
    assert kit.drafter is not None, format_value(kit)
    return FrameModel(kit.drafter, kit.shape.length.max_length)
