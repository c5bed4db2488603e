"""Drafting continuous tokens with a small image model that takes the target's steps."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.distributions.gaussian import DrivingNoise
from mmspec.draft import Draft, Drafter, Kind
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.shapes import Chain
from mmspec.models.loading import load_model, model_type, random_model
from mmspec.models.mar import MarConfig, MarForImageGeneration
from mmspec.recipe import DraftModelKind, Kit
from mmspec.targets.continuous.patches import CellQuery, Patches, PatchReader, cell_keys
from mmspec.targets.continuous.paths import PathDistribution
from mmspec.trees import Tree


@dataclass(frozen=True)
class PatchPace(ABC):
    """How many steps to draft; the target generates the first share `target_share` alone.

    Raises ValueError for a `length` below 1 and a share outside [0, 1].
    """

    length: int
    target_share: float = 0.0

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"length={self.length} drafts nothing; give 1 step or more")
        if not 0 <= self.target_share <= 1:
            raise ValueError(f"prefill={self.target_share} is not a share of an image; give 0 to 1")

    @abstractmethod
    def levels(self, step: int, steps: int) -> int: ...


class Ahead(PatchPace):
    """`length` steps, capped at the end; none in the first share `target_share` of an image."""

    def levels(self, step: int, steps: int) -> int:
        return 0 if step < self.target_share * steps else min(self.length, steps - step)


@dataclass(frozen=True)
class Milestones(PatchPace):
    """Up to the next multiple of `length`, or the last step, as the published code of CSpD.

    The target takes steps 0 to `target_share` x steps itself (the pre-filling ratio).
    """

    target_share: float = 0.15

    def levels(self, step: int, steps: int) -> int:
        if step <= self.target_share * steps:
            return 0
        following = -(-step // self.length) * self.length
        return min(following, steps - 1) - step + 1


@dataclass(frozen=True)
class AlignedDrafter(Drafter):
    """Draft steps with another model of the same tokens, driven by the target's own noise.

    CSpD's trajectory alignment (Wang et al. 2024): the initial noise and that of every step of the
    diffusion head belong to the cell, so a draft model that equals the target generates its image.
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
            return context.empty_draft()
        level_tensor = torch.tensor(levels, device=context.device)
        mask = torch.arange(depth, device=context.device) < level_tensor[:, None]
        block, latents = context.block(depth), context.latents.clone()
        noise = cell_keys(context.noise, block.cells)
        distributions: list[PathDistribution] = []
        paths: list[Tensor] = []
        noise_draws: list[Tensor] = []
        for index in range(depth):
            row = mask[:, index].nonzero().squeeze(1)
            cells, real = block.cells[row, index], block.real[row, index]
            shown = context.visible_mask(block.begin[:, index : index + 1])[row, 0]
            query = CellQuery(latents[row], shown, cells, real, row, block.end[row, index])
            distribution = self.reader.distribution(query).scatter(mask[:, index])
            noise_draws.append(distribution.noise(type(noise)(noise.key[:, index])))
            path, _ = distribution.walk(noise_draws[-1])
            at = real.nonzero(as_tuple=True)
            latents[row[at[0]], cells[at]] = path[row][at][:, -1]
            distributions.append(distribution)
            paths.append(path)
        tree, made = Tree.chain(depth), torch.stack(paths, 1)
        ragged = mask if min(levels) < depth else None
        noises = DrivingNoise(torch.stack(noise_draws, 1))
        return Draft.from_tree(
            tree, made, Kind.RACE, PathDistribution.stack(distributions), ragged, noises
        )

    def observe(self, *news: Any) -> None:
        return None


def aligned_model(kit: Kit) -> Drafter:
    """A small image model on the target's noise, a fixed number of steps at a time."""
    assert kit.drafter is not None
    return AlignedDrafter(kit.drafter.reader, Ahead(_length(kit), kit.options["prefill"]))


def aligned_to_milestones(kit: Kit) -> Drafter:
    """The same, verified at the steps that are multiples of the length."""
    assert kit.drafter is not None
    return AlignedDrafter(kit.drafter.reader, Milestones(_length(kit), kit.options["prefill"]))


def _length(kit: Kit) -> int:
    if not (isinstance(kit.shape, Chain) and isinstance(kit.shape.length, Fixed)):
        raise ValueError(
            f"continuous tokens are drafted a fixed number of steps at a time, not as "
            f"{kit.shape!r}; give length= a number"
        )
    return kit.shape.length.max_length


SHARED_CONFIG = ("side", "channels", "patch_size", "num_classes", "base_steps", "latent_scale")


@dataclass(frozen=True)
class SmallMarKind(DraftModelKind):
    """Smaller MAR models of the target's tokens; each call binds them to classes and sampler."""

    description: str = "draft model"

    def accepts(self, model: Any) -> bool:
        return isinstance(model, MarForImageGeneration)

    def owns(self, folder: Path) -> bool:
        there = (folder / "config.json").exists()
        return there and model_type(folder) == MarConfig.model_type

    def load(
        self, source: str | Path, target: Any, dtype: torch.dtype | None = None
    ) -> MarForImageGeneration:
        loaded: MarForImageGeneration = load_model(
            MarForImageGeneration, source, "MAR model", dtype
        )
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
    for name in SHARED_CONFIG:
        own, theirs = getattr(target.config, name), getattr(small.config, name)
        if own != theirs:
            raise ValueError(
                f"the draft model has {name}={theirs} and the target {name}={own}, so their tokens "
                "differ; give two models for the same images"
            )
