"""Drawing pictures: a request for `generate_images` becomes a request of the loop, and comes back.

What differs between image models is data (`Painter`, made on the modalities shelf). The loop knows
nothing of pictures: guidance is part of the backbone, structure is part of the law.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from mmspec.arguments import SAMPLED, fresh_seed, sampled, unknown_message
from mmspec.codebook import Codebook, Metric
from mmspec.grid import Grid
from mmspec.guidance import NEGATIVE, SCALE
from mmspec.raster import Raster
from mmspec.sampling import Sampling
from mmspec.stats import Stats
from mmspec.stop import Stop

OWN = ("prompt", "grid", "guidance", "negative", "seed", "row_ids", "do_sample", *SAMPLED)
Words = Callable[[Any, Sequence[str], Grid], Mapping[str, Any]]  # processor, prompts, grid
Peer = Callable[[Mapping[str, Any], Sampling], Tensor]  # request, settings -> tokens (B, L)


@dataclass(frozen=True, eq=False)
class Painter:
    """What differs between image models, as far as drawing is concerned.

    `decode` takes code indices, in the order of the codebook. `layout` lays out rows and columns
    and raises ValueError for what the model cannot draw. `request` turns a processor's tensors into
    the engine's, `unconditional` those into the unconditional prompt's; it is None where only the
    user can give one. `words` turns prompts into what `request` takes, None where the model reads
    none; `peer` is the model's own way to draw, where it has one. `encode` is the way back from
    `decode`, None where the model has no encoder.
    """

    name: str
    codebook: Codebook  # vectors, the token of each code, and the decoder's geometry
    layout: Callable[[int, int], Grid]
    size: tuple[int, int] | None  # rows, columns where the user gives none
    guidance: float  # the published scale
    decode: Callable[[Tensor], Tensor]  # (B, H, W) -> (B, 3, h, w) in [-1, 1]
    inputs: tuple[str, ...]  # names of what `request` reads
    request: Callable[[Mapping[str, Any]], dict[str, Any]]
    unconditional: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    words: Words | None = None
    peer: Peer | None = None
    encode: Callable[[Tensor], Tensor] | None = None  # (B, 3, h, w) in [-1, 1] -> (B, H, W)


@dataclass(frozen=True)
class Images:
    """What `generate_images` returns."""

    images: list[Image.Image]
    ids: Tensor  # (B, H, W) int64: the token in each cell
    sequences: Tensor  # (B, L) int64: all new tokens, structure included
    rounds: Tensor  # (B, H, W) int64: the round that each cell was accepted in, 0 = the prompt's
    stats: Stats


@dataclass(frozen=True, eq=False)
class Drawing:
    """One `generate_images` call in terms of the loop."""

    painter: Painter
    grid: Grid
    inputs: dict[str, Any]
    sampling: Sampling
    stop: Stop
    seed: int
    row_ids: Sequence[int] | None

    def finish(
        self, tokens: Sequence[Sequence[int]], rounds: Sequence[Sequence[int]], stats: Stats
    ) -> Images:
        """Cut the cells out of the new tokens and decode them."""
        codes = self.painter.codebook.codes
        sequences, turns = (torch.tensor(rows, device=codes.device) for rows in (tokens, rounds))
        ids = self.placed(sequences)
        drawn = pictures(self.painter.decode(codes[ids]))
        return Images(drawn, ids, sequences, self.placed(turns), stats)

    def placed(self, sequences: Tensor) -> Tensor:  # (B, L) -> (B, H, W)
        """What of a picture's tokens stands in cells."""
        return sequences[:, cells(self.grid, sequences.device)]


def codebook(
    name: str, vectors: Tensor, ids: Tensor, vocabulary: int, metric: Metric = "raw"
) -> Codebook:
    """The codebook (K, d) of a model and the tokens (K,) by which it speaks of the codes.

    Raises ValueError where their numbers differ.
    """
    if len(ids) != len(vectors):
        raise ValueError(
            f"{name} speaks {len(ids)} picture tokens, but its codebook has {len(vectors)} codes; "
            "load a model and a tokeniser that belong together"
        )
    return Codebook(vectors.detach(), ids.to(vectors.device), vocabulary, metric)


def prepare(
    painter: Painter,
    vocabulary: int,
    most: int | None,
    arguments: Mapping[str, Any],
    processor: Any = None,
) -> Drawing:
    """Check the arguments of `generate_images`.

    `vocabulary` is the size of the target's, `most` its longest sequence; `processor` turns prompts
    into tensors. Raises ValueError for unknown names, a grid that the model cannot draw, guidance
    without an unconditional prompt, words for a model that reads none.
    """
    unknown = sorted(set(arguments) - set(OWN) - set(painter.inputs))
    if unknown:
        known = [*painter.inputs, *OWN]
        raise ValueError(unknown_message(unknown, known, "generate_images()"))
    grid = _grid(painter, arguments.get("grid"), vocabulary)
    arguments = _read(painter, processor, grid, arguments)
    inputs = painter.request({n: arguments[n] for n in painter.inputs if n in arguments})
    length = inputs["attention_mask"].shape[1]
    if most is not None and length + grid.length > most:
        raise ValueError(
            f"a prompt of {length} tokens and a picture of {grid.length} do not fit into the "
            f"{most} positions of {painter.name}; give a smaller grid="
        )
    start = inputs["attention_mask"].sum(-1, keepdim=True)
    seed = arguments.get("seed")
    return Drawing(
        painter,
        grid,
        _guided(painter, inputs, arguments),
        _sampling(arguments, Raster(grid, start)),
        Stop(grid.length),
        fresh_seed() if seed is None else int(seed),
        arguments.get("row_ids"),
    )


def cells(grid: Grid, device: torch.device) -> Tensor:  # (H, W)
    """Offsets of a grid's cells."""
    rows = torch.arange(grid.height, device=device)[:, None] * grid.period
    return len(grid.header) + rows + torch.arange(grid.width, device=device)


@torch.no_grad()
def pictures(pixels: Tensor) -> list[Image.Image]:  # (B, 3, h, w) in [-1, 1]
    """Pixels as pictures."""
    scaled = ((pixels.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return [Image.fromarray(picture) for picture in scaled.permute(0, 2, 3, 1).cpu().numpy()]


def token_request(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The `request` of models whose prompt is plain token ids."""
    ids = inputs.get("input_ids")
    if ids is None or ids.dim() != 2 or not ids.numel():
        raise ValueError(
            "the request has no prompt; pass the processor's output: generate_images(**inputs)"
        )
    mask = inputs.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask
    if bool((mask[:, -1] == 0).any()):
        raise ValueError("the prompts are padded on the right; pad on the left")
    return {"input_ids": ids, "attention_mask": mask}


def _read(
    painter: Painter, processor: Any, grid: Grid, arguments: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The arguments with tensors in place of prompts in words."""
    prompt, negative = arguments.get("prompt"), arguments.get("negative")
    rest = {name: value for name, value in arguments.items() if name != "prompt"}
    texts = [prompt] if isinstance(prompt, str) else prompt
    if texts is not None:
        clash = [name for name in painter.inputs if name in arguments]
        if clash:
            raise ValueError(f"prompt= and {', '.join(clash)}= both say what to draw; give one")
        rest |= _worded(painter, processor, texts, grid)
    if negative is not None and not isinstance(negative, Mapping):
        single = isinstance(negative, str)
        others = [negative] * (1 if texts is None else len(texts)) if single else negative
        rest["negative"] = _worded(painter, processor, others, grid)
    return rest


def _worded(
    painter: Painter, processor: Any, texts: Sequence[str], grid: Grid
) -> Mapping[str, Any]:
    if painter.words is None:
        raise ValueError(
            f"{painter.name} reads no words; give what it draws behind: "
            f"generate_images({'=..., '.join(painter.inputs)}=...)"
        )
    if processor is None:
        raise ValueError(
            "a prompt in words needs the model's processor; give it once, as accelerate(model, "
            f"processor=...), or pass its tensors ({', '.join(painter.inputs)})"
        )
    if not len(texts) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"prompt={texts!r} is neither a text nor a list of texts")
    made, device = painter.words(processor, texts, grid), painter.codebook.vectors.device
    return {name: value.to(device) for name, value in made.items()}


def _grid(painter: Painter, given: Any, vocabulary: int) -> Grid:
    if isinstance(given, Grid):
        ids = given.ids()
        named = (
            *given.header,
            *given.footer,
            *(() if given.separator is None else (given.separator,)),
        )
        if max(int(ids.max()), *named, 0) >= vocabulary or not bool(
            torch.isin(ids, painter.codebook.ids.cpu()).all()
        ):
            raise ValueError(
                f"the grid has tokens that {painter.name} does not speak; make it with rows and "
                "columns only: grid=(height, width)"
            )
        return given
    size = painter.size if given is None else given
    if size is None:
        raise ValueError(f"{painter.name} draws any size; give grid=(height, width) in codes")
    if not (isinstance(size, tuple | list) and len(size) == 2):
        raise ValueError(f"grid={given!r} is no size; give (height, width) in codes, or a Grid")
    return painter.layout(int(size[0]), int(size[1]))


def _guided(
    painter: Painter, inputs: dict[str, Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """The inputs, with scale and unconditional prompt where there is guidance."""
    given = arguments.get("guidance")
    scale = painter.guidance if given is None else float(given)
    if not 0 <= scale < math.inf:
        raise ValueError(f"guidance={scale} is no scale; give 1 for none, or more, such as 5")
    if scale == 1:
        return inputs
    negative = arguments.get("negative")
    if negative is not None:
        negative = painter.request(negative)
    elif painter.unconditional is not None:
        negative = painter.unconditional(inputs)
    else:
        raise ValueError(
            f"guidance={scale} needs an unconditional prompt, and {painter.name} has none of its "
            "own; give negative= the processor's output for one, or guidance=1"
        )
    return {**inputs, SCALE: scale, NEGATIVE: negative}


def _sampling(arguments: Mapping[str, Any], raster: Raster) -> Sampling:
    names = ("do_sample", *SAMPLED)
    settings = sampled({n: arguments[n] for n in names if arguments.get(n) is not None})
    return Sampling(**settings, places=(raster,))
