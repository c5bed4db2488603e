"""A smaller picture, drawn row by row by a model of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmspec.codes.grid import Grid
from mmspec.codes.grid_mask import GridMask
from mmspec.codes.image_family import ImageFamily
from mmspec.codes.resampling import Lawful, Repeated, Resampler, ThroughPixels, Trained
from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import Lane
from mmspec.distributions.sampling import Sampling
from mmspec.errors import is_whole
from mmspec.models.code_resampler import FOLDER, CodeResampler, load_resampler
from mmspec.recipe import Kit
from mmspec.targets.memory import Memory, TokenBlock, block
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True)
class Sketcher:
    """Draws rows of a picture behind given ones, with the target's settings and guidance.

    The prompt is the target's. Given rows are read once and stay in memory; what is drawn here is
    not kept, because it is given back as something else, if only slightly.
    """

    backbone: Any  # a `mmspec.targets.readers.guidance.Guided`

    def begin(self, context: Context, grid: Grid) -> Sketch:
        """Read the prompts."""
        inputs = {**context.request.inputs, **context.request.drafter_inputs}
        memory, logits, _ = self.backbone.prefill(inputs, room=grid.length + 64)
        start = context.position()
        sampling = replace(context.sampling, places=(GridMask(grid, start),))
        return Sketch(grid, sampling, start, memory, logits[:, None], [0] * context.batch)

    def row(self, context: Context, sketch: Sketch, given: Sequence[Sequence[int]]) -> Tensor:
        """The codes (B, w) of one more row, as tokens, behind the picture tokens `given` so far.

        Rows of the batch may stand in different rows of their pictures. One that has nothing new to
        read takes part, and what it says is not to be used.
        """
        logits = self._read(sketch, given)
        memory, device = sketch.memory, context.device
        place = torch.tensor([[len(tokens)] for tokens in given], device=device)
        drawn: list[Tensor] = []
        for step in range(sketch.grid.width):
            if step:
                logits, _ = self.backbone.read(memory, _link(drawn[-1], step - 1, memory.like))
            distribution = sketch.sampling.distribution(logits, None, sketch.start + place + step)
            drawn.append(_drawn(distribution, context, step))
        return torch.cat(drawn, 1)

    def _read(self, sketch: Sketch, given: Sequence[Sequence[int]]) -> Tensor:  # (B, 1, V)
        """Read what is new among the given tokens; logits of the token behind them."""
        pairs = zip(given, sketch.read, strict=True)
        news = [list(tokens[read:]) for tokens, read in pairs]
        if not any(news):
            return sketch.first
        filler = [int(sketch.grid.ids()[0])]  # for rows without news; it is not kept
        layout = block([new or filler for new in news], None, sketch.memory.like)
        logits: Tensor = self.backbone.read(sketch.memory, layout)[0]
        sketch.memory.advance([len(new) for new in news])
        sketch.read = [len(tokens) for tokens in given]
        return logits


@dataclass
class Sketch:
    """One request's small pictures."""

    grid: Grid
    sampling: Sampling
    start: Tensor  # (B, 1) absolute position of their first tokens
    memory: Memory
    first: Tensor  # (B, 1, V) logits behind the prompts
    read: list[int]  # picture tokens in memory, per row


def _drawn(distribution: Categorical, context: Context, step: int) -> Tensor:  # (B, 1)
    index = torch.tensor([step], device=context.device)
    return distribution.sample(context.noise.fresh(Lane.DRAFT, index))


def _link(token: Tensor, behind: int, like: Tensor) -> TokenBlock:
    """One token behind `behind` others that are read but not kept."""
    depths = torch.full((1, 1), behind, device=token.device)
    return TokenBlock(token, depths, like.new_zeros(1, 1, behind + 1), 0, None, behind)


UPSAMPLERS = ("auto", "pixels", "latent")


def ratio_of(fine: ImageFamily, coarse: ImageFamily, given: Any) -> int:
    """How many times smaller the drafter draws: as given, or by the sizes; 2 where there is none.

    Raises ValueError where one size does not divide the other.
    """
    if given is not None:
        if not is_whole(given) or given < 1:
            raise ValueError(f"ratio={given!r} is no number of codes; give 2, say")
        return int(given)
    if fine.size is None or coarse.size is None:
        return 2
    ratios = {large / small for large, small in zip(fine.size, coarse.size, strict=True)}
    ratio = int(max(ratios))
    if ratios != {ratio}:
        sizes = [f"{height} x {width}" for height, width in (fine.size, coarse.size)]
        raise ValueError(
            f"the target draws {sizes[0]} codes, the drafter {sizes[1]}: that is no whole number "
            "of times smaller; choose another draft model, or give ratio= and a grid"
        )
    return ratio


def sampler_of(kit: Kit, fine: ImageFamily, coarse: ImageFamily, ratio: int) -> Resampler | Lawful:
    """The up-sampler by name, from a folder, or as an object."""
    given = kit.options["upsampler"]
    if given == "auto" and (beside := beside_of(kit)) is not None:
        given = beside
    if isinstance(given, Path) or (isinstance(given, str) and Path(given).is_dir()):
        given = load_resampler(given)
    if isinstance(given, CodeResampler):
        return Trained(fine.codebook, coarse.codebook, ratio, given)
    if not isinstance(given, str):
        made: Resampler | Lawful = given
        return made
    if given not in UPSAMPLERS:
        raise ValueError(
            f"upsampler={given!r} is neither known nor a folder; choose one of "
            f"{', '.join(UPSAMPLERS)}, or pass a Resampler, a CodeResampler or its folder"
        )
    if given == "auto":
        blind = fine.encode is None or coarse.encode is None
        given = "latent" if blind or ratio == 1 else "pixels"
    if given == "pixels":
        return ThroughPixels(fine, coarse, ratio)
    return Repeated(fine.codebook, coarse.codebook, ratio)


def beside_of(kit: Kit) -> Path | None:
    """The folder of the resampler that lies beside the draft model's weights, if there is one."""
    assert kit.drafter is not None
    name = kit.drafter.model.name_or_path
    folder = Path(name) / FOLDER
    return folder if name and (folder / "config.json").exists() else None
