"""What a trace of a vision-language model shows beside its text: what the drafter saw."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isqrt
from typing import Any

import torch
from einops import rearrange
from PIL import Image
from torch import Tensor

from mmspec.compressors.contract import Compressed, Features
from mmspec.tracing.media import image_uri

MOST_IMAGES, SIDE = 16, 256  # images or frames that are shown, and their pixels
CHANNELS = 3


def find_processor(formatter: Any) -> Any:
    """What decodes its tokens."""
    return formatter.processor


def depict(session: Any, output: Any, trace: Any) -> dict[str, Any]:
    """The view `kept`: what a compressor left of each image for the draft model."""
    if not trace.kept:
        return {}
    pictures, shown = [*_list_pictures(trace.call.request.inputs)], list[dict[str, Any]]()
    for found, made in trace.kept[:1]:
        pairs = (
            (row, image, left)
            for row, (images, lefts) in enumerate(zip(found, made, strict=True))
            for image, left in zip(images, lefts, strict=True)
            if image.grid is not None
        )
        for row, image, left in pairs:
            shown += [{"row": row, **one} for one in _describe_image(image, left)]
    for one, picture in zip(shown, pictures, strict=False):
        one["image"] = image_uri(picture, SIDE)
    for one in shown[len(pictures) :]:
        one["image"] = image_uri(Image.new("RGB", (SIDE, SIDE), "gray"), SIDE)
    note = f"The first {MOST_IMAGES} of {len(shown)} are shown." if shown[MOST_IMAGES:] else ""
    own = session.recipe.compressor
    name = own if isinstance(own, str) else type(own).__name__
    return {"kept": {"compressor": name, "images": shown[:MOST_IMAGES], "note": note}}


def _describe_image(image: Features, left: Compressed) -> Iterator[dict[str, Any]]:
    """How many originals every cell stands for, a frame at a time; 0 = dropped."""
    frames, rows, columns = image.shape
    where = torch.searchsorted(image.positions, left.positions)
    sizes = torch.zeros_like(image.positions).index_add(0, where, left.sizes)
    kept = torch.zeros_like(image.positions).index_add(0, where, torch.ones_like(left.sizes))
    for frame, (own, count) in enumerate(
        zip(sizes.view(frames, -1).tolist(), kept.view(frames, -1).sum(1).tolist(), strict=True)
    ):
        name = {} if frames == 1 else {"name": f"frame {frame + 1}"}
        yield {"grid": [rows, columns], "sizes": own, "kept": count, **name}


def _list_pictures(inputs: Mapping[str, Any]) -> Iterator[Image.Image]:
    """The images and frames of a request, as its encoder reads them."""
    pixels = inputs.get("pixel_values")
    if isinstance(pixels, Tensor) and pixels.dim() == 4:  # (images, C, H, W)
        yield from map(_to_image, pixels)
    for name, grids in (
        ("pixel_values", "image_grid_thw"),
        ("pixel_values_videos", "video_grid_thw"),
    ):
        patches, sizes = inputs.get(name), inputs.get(grids)
        if isinstance(patches, Tensor) and isinstance(sizes, Tensor):
            counts = sizes.prod(-1).tolist()
            for part, size in zip(patches.split(counts), sizes.tolist(), strict=True):
                yield from map(_to_image, _join_patches(part, *size))


def _join_patches(patches: Tensor, frames: int, rows: int, columns: int) -> Tensor:
    """Images (frames, C, H, W) of patches (n, C t p p) in groups of 2 x 2, as Qwen-VL has them."""
    side = isqrt(patches.shape[1] // (CHANNELS * 2))
    return rearrange(
        patches,
        "(f y x m n) (c t p q) -> f t c (y m p) (x n q)",
        f=frames,
        y=rows // 2,
        x=columns // 2,
        m=2,
        n=2,
        c=CHANNELS,
        p=side,
        q=side,
    )[:, 0]


def _to_image(pixels: Tensor) -> Image.Image:  # (C, H, W), normalised
    low, high = pixels.amin(), pixels.amax()
    scaled = ((pixels.float() - low) / (high - low).clamp_min(1e-6) * 255).round().byte()
    return Image.fromarray(scaled.permute(1, 2, 0).cpu().numpy())
