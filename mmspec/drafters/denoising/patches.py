"""Drafting continuous tokens with a small image model that takes the target's steps."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.distributions.gaussian import Driving
from mmspec.draft import Draft, Drafter, Kind
from mmspec.drafters.growth import Chain
from mmspec.drafters.lengths.length import Fixed
from mmspec.models.loading import model_type
from mmspec.models.mar import MarConfig, MarForImageGeneration
from mmspec.models.random_weights import random_model
from mmspec.models.reading import read
from mmspec.recipe import DraftModelKind, Kit
from mmspec.targets.continuous.patches import CellQuery, Patches, PatchReader, cell_keys
from mmspec.targets.continuous.paths import PathDistribution
from mmspec.trees import Tree


@dataclass(frozen=True)
class PatchPace(ABC):
    """How many steps to draft from where a picture stands; the target begins it `alone`.

    Raises ValueError for a `length` that drafts nothing, and for no share of a picture.
    """

    length: int
    alone: float = 0.0

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"length={self.length} drafts nothing; give 1 step or more")
        if not 0 <= self.alone <= 1:
            raise ValueError(f"prefill={self.alone} is no share of a picture; give 0 to 1")

    @abstractmethod
    def levels(self, step: int, steps: int) -> int: ...


class Ahead(PatchPace):
    """`length` steps, as far as there are so many; none in the first share `alone` of a picture."""

    def levels(self, step: int, steps: int) -> int:
        return 0 if step < self.alone * steps else min(self.length, steps - step)


@dataclass(frozen=True)
class Milestones(PatchPace):
    """Up to the next multiple of `length`, or the last step, as the published code of CSpD.

    The target takes steps 0 to `alone` x steps itself (the pre-filling ratio).
    """

    alone: float = 0.15

    def levels(self, step: int, steps: int) -> int:
        if step <= self.alone * steps:
            return 0
        following = -(-step // self.length) * self.length
        return min(following, steps - 1) - step + 1


@dataclass(frozen=True)
class Aligned(Drafter):
    """Draft steps with another model of the same tokens, driven by the target's own noise.

    CSpD's trajectory alignment (Wang et al. 2024): the first noise and that of every step of the
    diffusion head belong to the cell, so a draft that equals the target makes its very picture.
    """

    reader: PatchReader
    pace: PatchPace = field(default_factory=lambda: Ahead(4))
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.RACE,)

    def begin(self, context: Patches) -> None:
        return None

    def propose(self, context: Patches, state: None) -> Draft:
        steps = len(context.spans)
        rows = zip(context.step, context.finished, strict=True)
        levels = [0 if done else self.pace.levels(step, steps) for step, done in rows]
        depth = max(levels)
        if not depth:
            return context.nothing()
        deep = torch.tensor(levels, device=context.device)
        mask = torch.arange(depth, device=context.device) < deep[:, None]
        block, latents = context.block(depth), context.latents.clone()
        noise = cell_keys(context.noise, block.cells)
        distributions: list[PathDistribution] = []
        paths: list[Tensor] = []
        driving: list[Tensor] = []
        for index in range(depth):
            row = mask[:, index].nonzero().squeeze(1)
            cells, real = block.cells[row, index], block.real[row, index]
            shown = context.shown(block.begin[:, index : index + 1])[row, 0]
            asked = CellQuery(latents[row], shown, cells, real, row, block.end[row, index])
            distribution = self.reader.distribution(asked).among(mask[:, index])
            driving.append(distribution.noise(type(noise)(noise.key[:, index])))
            path, _ = distribution.walk(driving[-1])
            at = real.nonzero(as_tuple=True)
            latents[row[at[0]], cells[at]] = path[row][at][:, -1]
            distributions.append(distribution)
            paths.append(path)
        tree, made = Tree.chain(depth), torch.stack(paths, 1)
        ragged = mask if min(levels) < depth else None
        noises = Driving(torch.stack(driving, 1))
        return Draft.of(
            tree, made, Kind.RACE, PathDistribution.stack(distributions), ragged, noises
        )

    def observe(self, *news: Any) -> None:
        return None


def aligned_model(kit: Kit) -> Drafter:
    """A small image model on the target's noise, so many steps at a time."""
    assert kit.drafter is not None
    return Aligned(kit.drafter.reader, Ahead(_length(kit), kit.options["prefill"]))


def aligned_to_milestones(kit: Kit) -> Drafter:
    """The same, verified where the step is a multiple of the length."""
    assert kit.drafter is not None
    return Aligned(kit.drafter.reader, Milestones(_length(kit), kit.options["prefill"]))


def _length(kit: Kit) -> int:
    if not (isinstance(kit.shape, Chain) and isinstance(kit.shape.length, Fixed)):
        raise ValueError(
            f"continuous tokens are drafted so many steps at a time, not as {kit.shape!r}; give "
            "length= a number"
        )
    return kit.shape.length.most


SHARED = ("side", "channels", "patch_size", "num_classes", "base_steps", "latent_scale")


@dataclass(frozen=True)
class SmallMarKind(DraftModelKind):
    """Smaller MAR models of the target's tokens; a call binds them to its classes and sampler."""

    words: str = "draft model"

    def accepts(self, model: Any) -> bool:
        return isinstance(model, MarForImageGeneration)

    def owns(self, folder: Path) -> bool:
        there = (folder / "config.json").exists()
        return there and model_type(folder) == MarConfig.model_type

    def load(
        self, source: str | Path, target: Any, dtype: torch.dtype | None = None
    ) -> MarForImageGeneration:
        loaded: MarForImageGeneration = read(MarForImageGeneration, source, "MAR model", dtype)
        return loaded

    def read(self, model: Any, target: Any, sees: str) -> MarForImageGeneration:
        check_tokens(model, target.model)
        return model  # type: ignore[no-any-return]  # checked

    def random(self, target: Any, seed: int) -> MarForImageGeneration:
        config = copy.deepcopy(target.model.config)
        config.num_hidden_layers = config.decoder_num_hidden_layers = config.head_depth = 1
        model: MarForImageGeneration = random_model(lambda: type(target.model)(config), seed)
        return model


SMALL_MAR = SmallMarKind()


def check_tokens(small: Any, target: Any) -> None:
    """Refuse a draft model of other tokens. Raises ValueError."""
    if not isinstance(small, MarForImageGeneration):
        raise ValueError(
            f"drafter= is a {type(small).__name__}, but a MAR model is drafted for by a MAR model; "
            "give a smaller one of the same tokens"
        )
    for name in SHARED:
        own, theirs = getattr(target.config, name), getattr(small.config, name)
        if own != theirs:
            raise ValueError(
                f"the draft model has {name}={theirs} and the target {name}={own}, so they speak "
                "of other tokens; give two models for the same pictures"
            )
