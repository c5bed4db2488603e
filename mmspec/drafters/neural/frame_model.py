"""A smaller model of the same codebooks drafts frames."""

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
from mmspec.errors import described
from mmspec.models.random_weights import random_model
from mmspec.recipe import DraftModelKind, Kit
from mmspec.targets.frames.frame_distributions import (
    Draw,
    FrameDistribution,
    ParallelDistribution,
    keyed,
)
from mmspec.targets.frames.frames import FrameMemory, FrameReader, Frames, Outputs, scored


@dataclass
class _FrameReading:
    """What the draft model remembers of a request."""

    memories: list[FrameMemory]
    last: list[Outputs]  # behind the prompt, until a frame was read


@dataclass(frozen=True)
class FrameModel(Drafter):
    """Draws a chain of at most `length` frames, with the target's own noise or with its own.

    It reads the prompt of the target, and is guided as the target is.
    """

    reader: FrameReader
    length: int
    kinds: tuple[Kind, ...] = (Kind.RACE, Kind.IID)
    sees: ClassVar[str] = "prompt"
    reads: ClassVar[bool] = True

    def drawing(self, kind: Kind) -> Drafter:
        return FrameModel(self.reader, self.length, (kind,))

    def begin(self, context: Frames) -> _FrameReading:
        return _FrameReading(*self.reader.begin(context.request.inputs, context.request.settings))

    def propose(self, context: Frames, state: _FrameReading) -> Draft:
        count = min(self.length, context.useful)
        if not count:
            return context.nothing()
        kind, settings = self.kinds[0], context.request.settings
        outputs = self._caught_up(context, state)
        frames: list[Tensor] = []
        distributions: list[FrameDistribution] = []
        for step in range(count):
            distribution = scored(
                self.reader, outputs, context.steps + step, settings
            ).distribution[:, 0]
            frame, said = _drawn(
                distribution, _draw(kind, context.noise, context.steps[:, 0] + step, step)
            )
            frames.append(frame)
            distributions.append(said)
            if step + 1 < count:
                outputs = self._read(context, state, frame, step)
        tokens = torch.stack(frames, 1)
        return Draft.chain(tokens, kind, None if kind is Kind.RACE else _joined(distributions))

    def observe(
        self, context: Frames, state: _FrameReading, draft: Draft, scores: Scores, kept: Round
    ) -> _FrameReading:
        for row, memory in enumerate(state.memories):
            accepted = min(kept.accepted[row], max(draft.nodes - 1, 0))
            now = len(context.history[row]) - len(kept.tokens[row])
            if not context.finished[row] and draft.nodes:
                memory.frames = now + accepted
        return state

    def _caught_up(self, context: Frames, state: _FrameReading) -> list[Outputs]:
        """Read what was said since, and answer for the place behind it, per row."""
        for row, memory in enumerate(state.memories):
            if context.finished[row] or memory.frames == len(context.history[row]):
                continue
            frames = context.unread(row, memory)
            memory.plan(len(frames))
            state.last[row] = tuple(one[-1:] for one in self.reader.read(memory, frames))
            memory.frames += len(frames)
        return state.last

    def _read(
        self, context: Frames, state: _FrameReading, frame: Tensor, step: int
    ) -> list[Outputs]:
        """Read a drafted frame of every row, which is not kept yet."""
        found = list[Outputs]()
        for row, memory in enumerate(state.memories):
            if context.finished[row]:
                found.append(())
                continue
            memory.cache.plan_uniform(memory.prompt + memory.frames + step, 1)
            found.append(self.reader.read(memory, frame[row][None]))
        return found


def _draw(kind: Kind, noise: Any, steps: Tensor, step: int) -> Draw:
    """Codes with the noise of their place, or with noise of the drafter's own."""
    if kind is Kind.RACE:
        return keyed(Keys(noise.shared(steps[:, None]).key[:, 0]))
    own: Noise = noise
    index = torch.tensor([step], device=steps.device)
    return keyed(Keys(own.fresh(Lane.DRAFT, index).key[:, 0]))


def _drawn(distribution: FrameDistribution, draw: Draw) -> tuple[Tensor, ParallelDistribution]:
    """A frame per row (B, K), and the distributions that its codes were drawn from."""
    said: list[Categorical] = []

    def recorded(one: Categorical, book: int) -> Tensor:
        said.append(one)
        return draw(one, book)

    blank = distribution.forced.clamp_min(0)
    frame = distribution.completed(blank, torch.zeros_like(blank[:, 0]), recorded)
    return frame, ParallelDistribution(Categorical.stack(said), distribution.forced)


def _joined(distributions: list[FrameDistribution]) -> ParallelDistribution:
    """Recorded distributions of following frames, (B, N)."""
    codes = Categorical.stack(
        [
            distribution.codes
            for distribution in distributions
            if isinstance(distribution, ParallelDistribution)
        ]
    )
    return ParallelDistribution(
        codes, torch.stack([distribution.forced for distribution in distributions], 1)
    )


@dataclass(frozen=True)
class _FrameModelKind(DraftModelKind):
    """A model of the target's own class, with its codebooks."""

    words: ClassVar[str] = "draft model"

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
    assert kit.drafter is not None, described(kit)
    return FrameModel(kit.drafter, kit.shape.length.most)
