"""Placeholder ids and processor tensors of every toy vision family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.toys.configs import BREAK, END, IMAGE, START, VIDEO, WORDS

Image = tuple[list[list[int]], dict[str, Tensor]]  # placeholder ids per row, processor tensors
ImageFamily = Callable[[list[int], torch.Generator], Image]


def _square(count: int, pixels: int, markers: bool = False) -> ImageFamily:
    """One square image per row, `count` placeholders."""

    def paint(rows: list[int], noise: torch.Generator) -> Image:
        block = [START, *[IMAGE] * count, END] if markers else [IMAGE] * count
        return [block for _ in rows], {
            "pixel_values": torch.randn(len(rows), 3, pixels, pixels, generator=noise)
        }

    return paint


def _anyres(onevision: bool) -> ImageFamily:
    """A 2x2-token overview plus two crops of 2x2, glued and with a newline per token row."""

    def paint(rows: list[int], noise: torch.Generator) -> Image:
        sizes = [(16, 32) if row % 2 == 0 else (32, 16) for row in rows]  # (height, width)
        blocks = [[IMAGE] * (4 + 8 + height // 8) for height, _ in sizes]
        tensors = {
            "pixel_values": torch.randn(len(rows), 3, 3, 16, 16, generator=noise),
            "image_sizes": torch.tensor(sizes),
        }
        if onevision:
            tensors["batch_num_images"] = torch.ones(len(rows), dtype=torch.long)
        return blocks, tensors

    return paint


def _grid(rows: list[int], noise: torch.Generator) -> Image:
    """Qwen-VL: flat patches of 2 x 4 x 4 pixels, merged 2 x 2."""
    sizes = [(1, 6, 8), (1, 4, 6), (1, 8, 4)]  # patches: time, height, width
    grid = torch.tensor([sizes[row % 3] for row in rows])
    patches = int(grid.prod(-1).sum())
    blocks = [[START, *[IMAGE] * (n // 4), END] for n in grid.prod(-1).tolist()]
    pixels = torch.randn(patches, 3 * 2 * 4 * 4, generator=noise)
    return blocks, {"pixel_values": pixels, "image_grid_thw": grid}


def _tiles(stacked: bool) -> ImageFamily:
    """Two 24 x 24 tiles per row, nine tokens each; Idefics stacks them, InternVL lists them."""

    def paint(rows: list[int], noise: torch.Generator) -> Image:
        tile = [START, *[IMAGE] * 9]
        pixels = torch.randn(len(rows), 2, 3, 24, 24, generator=noise)
        blocks = [[*tile, *tile, END] if stacked else [START, *[IMAGE] * 18, END] for _ in rows]
        if not stacked:
            return blocks, {"pixel_values": pixels.flatten(0, 1)}
        mask = torch.ones(len(rows), 2, 24, 24, dtype=torch.long)
        return blocks, {"pixel_values": pixels, "pixel_attention_mask": mask}

    return paint


def _pixtral(rows: list[int], noise: torch.Generator) -> Image:
    """Mistral3: 4 x 4 patches merged 2 x 2; a token row ends with a break, the last with END."""
    sizes = torch.tensor([(16, 24) if row % 2 == 0 else (24, 16) for row in rows])
    blocks = []
    for height, width in (sizes // 8).tolist():
        lines = [IMAGE] * width + [BREAK]
        blocks.append([*(lines * height)[:-1], END])
    height, width = sizes.amax(0).tolist()
    pixels = torch.zeros(len(rows), 3, height, width)
    for picture, (tall, wide) in zip(pixels, sizes.tolist(), strict=True):
        picture[:, :tall, :wide] = torch.randn(3, tall, wide, generator=noise)
    return blocks, {"pixel_values": pixels, "image_sizes": sizes}


def _naflex(rows: list[int], noise: torch.Generator) -> Image:
    """LFM2-VL: at most 24 patches of 4 x 4 per row, padded, merged 2 x 2."""
    shapes = torch.tensor([(4, 6) if row % 2 == 0 else (4, 4) for row in rows])
    counts = shapes.prod(-1)
    mask = (torch.arange(24) < counts[:, None]).long()
    pixels = torch.randn(len(rows), 24, 48, generator=noise) * mask[..., None]
    return [[START, *[IMAGE] * (n // 4), END] for n in counts.tolist()], {
        "pixel_values": pixels,
        "pixel_attention_mask": mask,
        "spatial_shapes": shapes,
    }


@dataclass(frozen=True)
class Film:
    """The shape of one clip: steps of time, and patches per frame (4 x 4 pixels each)."""

    frames: int = 6
    height: int = 4
    width: int = 4
    seconds: float = 3.0  # between two of them, where a family takes it


def clip(family: str, films: Sequence[Film], noise: torch.Generator) -> Image:
    """A video per row; every family marks frames in its own way.

    Families that take whole frames are given squares of 16 pixels, as many for every row.
    """
    if family in WHOLE_FRAMES:
        frames = films[0].frames
        pixels = torch.randn(len(films), frames, 3, 16, 16, generator=noise)
        per_frame, behind = WHOLE_FRAMES[family]
        blocks = [[VIDEO] * (frames * per_frame + behind) for _ in films]
        return blocks, {"pixel_values_videos": pixels}
    patches = sum(film.frames * film.height * film.width for film in films)
    tensors = {
        "pixel_values_videos": torch.randn(patches, 3 * 2 * 4 * 4, generator=noise),
        "video_grid_thw": torch.tensor([[one.frames, one.height, one.width] for one in films]),
    }
    if family == "qwen2_5_vl":
        tensors["second_per_grid_ts"] = torch.tensor([film.seconds for film in films])
    return [_video_tokens(family, film) for film in films], tensors


def _video_tokens(family: str, film: Film) -> list[int]:
    cells = film.height * film.width // 4
    if family in ("qwen2_vl", "qwen2_5_vl"):
        return [START, *[VIDEO] * cells * film.frames, END]
    stamps = range(30, 30 + film.frames)
    stamped = [[min(at, WORDS.stop - 1), START, *[VIDEO] * cells, END] for at in stamps]
    return [token for frame in stamped for token in frame]


# tokens per frame of 4 x 4 patches, and behind the clip
WHOLE_FRAMES = {"llava_onevision": (1, 1), "llava_next_video": (4, 0), "video_llava": (17, 0)}
CLIPS = (*WHOLE_FRAMES, "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
PAINTERS: dict[str, ImageFamily] = {
    "llava": _square(16, 16),
    "llava_next": _anyres(onevision=False),
    "llava_onevision": _anyres(onevision=True),
    "qwen2_vl": _grid,
    "qwen2_5_vl": _grid,
    "qwen3_vl": _grid,
    "gemma3": _square(16, 32, markers=True),
    "idefics3": _tiles(stacked=True),
    "smolvlm": _tiles(stacked=True),
    "internvl": _tiles(stacked=False),
    "paligemma": _square(16, 16),
    "mistral3": _pixtral,
    "qwen3_5": _grid,
    "lfm2_vl": _naflex,
}
