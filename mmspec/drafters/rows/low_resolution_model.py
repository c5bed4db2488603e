"""A draft model that generates a smaller image, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmspec.codes.grid import Grid, GridMask
from mmspec.codes.image_family import ImageFamily
from mmspec.codes.resampling import (
    ConditionalResampler,
    LatentResampler,
    PixelResampler,
    Resampler,
    TrainedResampler,
)
from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import Lane
from mmspec.distributions.sampling import Sampling
from mmspec.errors import is_integer
from mmspec.models.code_resampler import FOLDER, CodeResampler, load_resampler
from mmspec.recipe import Kit
from mmspec.targets.memory import Memory, TokenBlock, build_block
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True)
class LowResolutionModel:
    """Generates rows of an image after given ones, with the target's sampling and guidance.

    The prompt is the target's. Given rows are read once and stay in the cache; generated rows are
    not cached, because they come back changed by the up-sampler.
    """

    backbone: Any  # a `mmspec.targets.readers.guidance.Guided`

    def begin(self, context: Context, grid: Grid) -> LowResolutionState:
        """Read the prompts."""
        inputs = {**context.request.inputs, **context.request.drafter_inputs}
        memory, logits, _ = self.backbone.prefill(inputs, extra_slots=grid.length + 64)
        start = context.position()
        sampling = replace(context.sampling, position_processors=(GridMask(grid, start),))
        return LowResolutionState(
            grid, sampling, start, memory, logits[:, None], [0] * context.batch
        )

    def row(
        self, context: Context, sketch: LowResolutionState, given: Sequence[Sequence[int]]
    ) -> Tensor:
        """The codes (B, w) of one more row, as tokens, after the image tokens `given` so far.

        Rows of the batch may be at different rows of their images. A batch row without new tokens
        takes part; its output is not to be used.
        """
        logits = self._read(sketch, given)
        memory, device = sketch.memory, context.device
        place = torch.tensor([[len(tokens)] for tokens in given], device=device)
        columns: list[Tensor] = []
        for step in range(sketch.grid.width):
            if step:
                logits, _ = self.backbone.read(memory, _token_block(columns[-1], step - 1))
            distribution = sketch.sampling.distribution(logits, None, sketch.start + place + step)
            columns.append(_draw_tokens(distribution, context, step))
        return torch.cat(columns, 1)

    def _read(
        self, sketch: LowResolutionState, given: Sequence[Sequence[int]]
    ) -> Tensor:  # (B, 1, V)
        """Read the new tokens among the given ones; logits of the token after them."""
        pairs = zip(given, sketch.read, strict=True)
        new_tokens = [list(tokens[read:]) for tokens, read in pairs]
        if not any(new_tokens):
            return sketch.first
        filler = [int(sketch.grid.ids()[0])]  # for rows without new tokens; not cached
        layout = build_block([new or filler for new in new_tokens], None, sketch.memory.like)
        logits: Tensor = self.backbone.read(sketch.memory, layout)[0]
        sketch.memory.advance([len(new) for new in new_tokens])
        sketch.read = [len(tokens) for tokens in given]
        return logits


@dataclass
class LowResolutionState:
    """The small images of one request."""

    grid: Grid
    sampling: Sampling
    start: Tensor  # (B, 1) absolute position of their first tokens
    memory: Memory
    first: Tensor  # (B, 1, V) logits after the prompts
    read: list[int]  # image tokens in the cache, per row


def _draw_tokens(distribution: Categorical, context: Context, step: int) -> Tensor:  # (B, 1)
    index = torch.tensor([step], device=context.device)
    return distribution.sample(context.noise.fresh_keys(Lane.DRAFT, index))


def _token_block(token: Tensor, num_before: int) -> TokenBlock:
    """One token after `num_before` others that are read but not cached."""
    depths = torch.full((1, 1), num_before, device=token.device)
    corner = torch.ones(1, 1, num_before + 1, dtype=torch.bool, device=token.device)
    return TokenBlock(token, depths, corner, 0, None, num_before)


UPSAMPLERS = ("auto", "pixels", "latent")


def ratio_of(fine: ImageFamily, coarse: ImageFamily, given: Any) -> int:
    """The size ratio of target and draft image: as given, else from the sizes, else 2.

    Raises ValueError where one size does not divide the other.
    """
    if given is not None:
        if not is_integer(given) or given < 1:
            raise ValueError(
                f"ratio={given!r} is not a number of codes; give a whole number such as 2"
            )
        return int(given)
    if fine.size is None or coarse.size is None:
        return 2
    ratios = {large / small for large, small in zip(fine.size, coarse.size, strict=True)}
    ratio = int(max(ratios))
    if ratios != {ratio}:
        sizes = [f"{height} x {width}" for height, width in (fine.size, coarse.size)]
        raise ValueError(
            f"the target generates {sizes[0]} codes, the drafter {sizes[1]}: not a whole ratio; "
            "choose another draft model, or give ratio= and a grid"
        )
    return ratio


def build_upsampler(
    kit: Kit, fine: ImageFamily, coarse: ImageFamily, ratio: int
) -> Resampler | ConditionalResampler:
    """The up-sampler, by name, from a folder, or as an object."""
    given = kit.options["upsampler"]
    if given == "auto" and (folder := find_resampler(kit)) is not None:
        given = folder
    if isinstance(given, Path) or (isinstance(given, str) and Path(given).is_dir()):
        given = load_resampler(given).to(kit.target.device)
    if isinstance(given, CodeResampler):
        if given.device != kit.target.device:
            raise ValueError(
                f"the resampler lies on {given.device} and the target on {kit.target.device}; give "
                f"upsampler=resampler.to({str(kit.target.device)!r})"
            )
        return TrainedResampler(fine.codebook, coarse.codebook, ratio, given)
    if not isinstance(given, str):
        resampler: Resampler | ConditionalResampler = given
        return resampler
    if given not in UPSAMPLERS:
        raise ValueError(
            f"upsampler={given!r} is neither a known name nor a folder; choose one of "
            f"{', '.join(UPSAMPLERS)}, or pass a Resampler, a CodeResampler or its folder"
        )
    if given == "auto":
        cannot_encode = fine.encode is None or coarse.encode is None
        given = "latent" if cannot_encode or ratio == 1 else "pixels"
    if given == "pixels":
        return PixelResampler(fine, coarse, ratio)
    return LatentResampler(fine.codebook, coarse.codebook, ratio)


def find_resampler(kit: Kit) -> Path | None:
    """The folder of the resampler saved with the draft model's weights, if there is one."""
    assert kit.drafter is not None
    name = kit.drafter.model.name_or_path
    folder = Path(name) / FOLDER
    return folder if name and (folder / "config.json").exists() else None
