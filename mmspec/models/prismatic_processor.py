"""Preprocess images and instructions for Prismatic models.

Every vision tower has its own normalisation; the results are stacked along channels: `pixel_values`
(n, 3 per tower, H, W). Fields are those of the published preprocessor_config.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import functional
from torchvision.transforms.functional import InterpolationMode
from transformers import BatchFeature, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor

from mmspec.models.prismatic_config import PrismaticConfig, check_per_tower

Picture = Any  # PIL image, array or tensor
PROMPT = "In: What action should the robot take to {instruction}?\nOut:"
EMPTY = (29871, "▁")  # of Llama's tokenizer: the last prompt token that policies are trained with
HALF = (0.5, 0.5, 0.5)
HALF_LEVEL = 1 / 510  # tolerance of floats outside [0, 1], for rounding errors


class PrismaticImageProcessor(BaseImageProcessor):
    """Transforms images of any size to `pixel_values`, with one transform per tower.

    `image_resize_strategy`: "letterbox" pads to a square with the first tower's mean colour,
    "resize-naive" ignores the aspect ratio, "resize-crop" crops the longer side. Before that, a
    center crop of `crop_area` of the area (0.9 for policies trained with random crops).

    Raises ValueError for lists of different lengths and unknown strategies.
    """

    model_input_names = ["pixel_values"]  # noqa: RUF012

    def __init__(
        self,
        use_fused_vision_backbone: bool = False,
        image_resize_strategy: str = "letterbox",
        input_sizes: Sequence[Sequence[int]] | None = None,
        interpolations: Sequence[str] | None = None,
        means: Sequence[Sequence[float]] | None = None,
        stds: Sequence[Sequence[float]] | None = None,
        crop_area: float | None = None,
        **kwargs: Any,
    ) -> None:
        self.use_fused_vision_backbone = use_fused_vision_backbone
        self.image_resize_strategy = image_resize_strategy
        self.input_sizes = [list(one) for one in input_sizes or [(3, 224, 224)]]
        count = len(self.input_sizes)
        self.interpolations = list(interpolations or ["bicubic"] * count)
        self.means = [list(one) for one in means or [HALF] * count]
        self.stds = [list(one) for one in stds or [HALF] * count]
        self.crop_area = crop_area
        self._check(kwargs)
        derived = {name: one for name, one in kwargs.items() if not name.startswith("tvf_")}
        super().__init__(**derived)

    @classmethod
    def of(cls, config: PrismaticConfig, **changes: Any) -> PrismaticImageProcessor:
        """Make the image processor of a model, with timm's normalisation and interpolation."""
        towers: list[Any] = [timm.get_pretrained_cfg(name) for name in config.timm_model_ids or []]
        given: dict[str, Any] = {
            "use_fused_vision_backbone": config.use_fused_vision_backbone,
            "image_resize_strategy": config.image_resize_strategy,
            "input_sizes": [(3, side, side) for side in config.image_sizes or []],
            "interpolations": [tower.interpolation for tower in towers],
            "means": [tower.mean for tower in towers],
            "stds": [tower.std for tower in towers],
        }
        return cls(**{**given, **changes})

    def __call__(self, images: Any, return_tensors: str = "pt") -> BatchFeature:  # type: ignore[override]
        """Return `pixel_values` (n, C, H, W) float32 of one or several images.

        Images are PIL images, arrays (H, W, 3) or tensors (3, H, W) or (H, W, 3), of bytes or of
        floats in [0, 1]. Raises TypeError and ValueError for anything else.
        """
        if return_tensors != "pt":
            raise ValueError(f"return_tensors={return_tensors!r} is not supported; give 'pt'")
        pictures = [to_rgb(one) for one in list_images(images)]
        return BatchFeature({"pixel_values": torch.stack([self.transform(p) for p in pictures])})

    def transform(self, picture: Image.Image) -> Tensor:  # (C, H, W)
        """Transform one RGB image for every tower."""
        if self.crop_area is not None:
            picture = crop_center(picture, self.crop_area)
        if self.image_resize_strategy == "letterbox":
            picture = letterbox(picture, [int(255 * one) for one in self.means[0]])
        towers, known = [], dict[Any, Tensor]()
        for size, interpolation, mean, std in zip(
            self.input_sizes, self.interpolations, self.means, self.stds, strict=True
        ):
            key = (*size[-2:], interpolation)
            if key not in known:  # towers of one size share the pixels
                known[key] = self._resize(picture, size, interpolation)
            towers.append(functional.normalize(known[key], mean, std))
        return torch.cat(towers)

    def _resize(self, picture: Image.Image, size: Sequence[int], interpolation: str) -> Tensor:
        """Resize one image for a tower: (3, H, W) in [0, 1]."""
        naive = self.image_resize_strategy == "resize-naive"
        target = list(size[-2:]) if naive else [size[-1]]
        mode = InterpolationMode(interpolation)
        resized = functional.resize(picture, target, mode, antialias=True)
        made: Tensor = functional.to_tensor(functional.center_crop(resized, list(size[-2:])))
        return made

    def _check(self, kwargs: Mapping[str, Any]) -> None:
        """Refuse inconsistent settings. Raises ValueError."""
        check_per_tower(self, "input_sizes", "interpolations", "means", "stds")
        if self.crop_area is not None and not 0 < self.crop_area <= 1:
            raise ValueError(f"crop_area={self.crop_area} must be in (0, 1]")
        for at, stored in enumerate(kwargs.get("tvf_normalize_params") or []):
            own = [self.means[at], self.stds[at]]
            if not np.allclose([stored["mean"], stored["std"]], own, atol=1e-3):
                raise ValueError(
                    f"tvf_normalize_params[{at}] differs from means and stds; correct "
                    "preprocessor_config.json"
                )


class PrismaticProcessor(ProcessorMixin):
    """Prepares prompts and images for one model; rows are padded on the left.

    With `image_token_id` and `patches` (`of` reads them from a model) image ids are inserted after
    the first token of a prompt; without, as for public folders, the model inserts them.
    """

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        image_token_id: int | None = None,
        patches: int | None = None,
        prompt: str = PROMPT,
        **_: Any,
    ) -> None:
        super().__init__(image_processor, tokenizer)  # type: ignore[no-untyped-call]
        self.image_token_id, self.patches, self.prompt = image_token_id, patches, prompt

    @classmethod
    def of(cls, model: Any, tokenizer: Any, **changes: Any) -> PrismaticProcessor:
        """Make the processor of a Prismatic model; `changes` go to its image processor."""
        images = PrismaticImageProcessor.of(model.config, **changes)
        return cls(images, tokenizer, model.config.image_token_id, model.vision_backbone.patches)

    def __call__(
        self,
        text: str | Sequence[str],
        images: Picture | Sequence[Picture] | Sequence[Sequence[Picture]] | None = None,
        padding: bool = True,
        padding_side: str = "left",
        return_tensors: str = "pt",
    ) -> BatchFeature:
        """Return `input_ids`, `attention_mask` (B, L) and `pixel_values` of unchanged prompts.

        `images` are one per prompt, or a list per prompt (cameras). Raises ValueError where numbers
        differ, and for rows of different lengths without padding.
        """
        if (padding_side, return_tensors) != ("left", "pt"):
            raise ValueError(
                f"padding_side={padding_side!r} and return_tensors={return_tensors!r}: rows are "
                "torch tensors padded on the left; give 'left' and 'pt'"
            )
        made = self._encode(_texts(text), images, ends=())
        if not padding and not bool(made["attention_mask"].all()):
            raise ValueError("prompts of different lengths make no tensor; give padding=True")
        return made

    def instruct(
        self,
        instruction: str | Sequence[str],
        images: Picture | Sequence[Picture] | Sequence[Sequence[Picture]] | None = None,
    ) -> BatchFeature:
        """Encode instructions for a robot, in the prompt that policies are trained with.

        Instructions are lower-cased, and Llama's empty token is appended. Raises ValueError for an
        empty instruction.
        """
        given = [one.strip() for one in _texts(instruction)]
        if not given or not all(given):
            raise ValueError("the instruction is empty; give the robot's task")
        prompts = [self.prompt.format(instruction=one.lower()) for one in given]
        return self._encode(prompts, images, ends=self._empty_token())

    def _empty_token(self) -> tuple[int, ...]:
        """Return Llama's token of the empty string; other tokenizers have none."""
        tokenizer: Any = self.tokenizer
        is_llama = (
            len(tokenizer) > EMPTY[0] and tokenizer.convert_ids_to_tokens(EMPTY[0]) == EMPTY[1]
        )
        return EMPTY[:1] if is_llama else ()

    def _encode(self, texts: Sequence[str], images: Any, ends: tuple[int, ...]) -> BatchFeature:
        tokenizer: Any = self.tokenizer
        rows = [_append_end(list(row), ends) for row in tokenizer(list(texts))["input_ids"]]
        made: dict[str, Tensor] = {}
        if images is not None:
            groups = _group_images(images, len(rows))
            pictures = [one for group in groups for one in group]
            made["pixel_values"] = self.image_processor(pictures)["pixel_values"]
            if self.image_token_id is not None and self.patches is not None:
                rows = [
                    [*row[:1], *[self.image_token_id] * (self.patches * len(group)), *row[1:]]
                    for row, group in zip(rows, groups, strict=True)
                ]
            elif any(len(group) != 1 for group in groups):
                raise ValueError(
                    "several images per prompt need their ids in it; make the processor with "
                    "PrismaticProcessor.of(model, tokenizer)"
                )
        length, pad = max(map(len, rows)), tokenizer.pad_token_id
        pads = [length - len(row) for row in rows]
        fill = tokenizer.eos_token_id or 0 if pad is None else pad
        ids = torch.tensor([[fill] * pad + row for pad, row in zip(pads, rows, strict=True)])
        mask = (torch.arange(length) >= torch.tensor(pads)[:, None]).long()
        return BatchFeature({"input_ids": ids, "attention_mask": mask, **made})


def _texts(text: str | Sequence[str]) -> list[str]:
    return [text] if isinstance(text, str) else list(text)


def _append_end(row: list[int], ends: tuple[int, ...]) -> list[int]:
    return row if not ends or row[-1] == ends[0] else [*row, *ends]


def _group_images(images: Any, rows: int) -> list[list[Picture]]:
    """Group images by prompt. Raises ValueError for another number of prompts."""
    given = list_images(images)
    groups = [list(one) if isinstance(one, list | tuple) else [one] for one in given]
    if len(groups) != rows:
        raise ValueError(
            f"{len(groups)} images for {rows} prompts; give one for each, or a list for each"
        )
    return groups


def list_images(images: Any) -> list[Any]:
    """Return a list of images; a batch with four axes is split along the first."""
    if isinstance(images, list | tuple):
        return list(images)
    if isinstance(images, np.ndarray | Tensor) and images.ndim == 4:
        return list(images)
    return [images]


def to_rgb(picture: Picture) -> Image.Image:
    """Convert an image to PIL. Raises TypeError and ValueError for other values."""
    if isinstance(picture, Image.Image):
        return picture.convert("RGB")
    if not isinstance(picture, np.ndarray | Tensor):
        raise TypeError(
            f"a {type(picture).__name__} is not an image; give a PIL image, an array (H, W, 3) or "
            "a tensor (3, H, W), of bytes or of floats in [0, 1]"
        )
    if isinstance(picture, Tensor):
        array = (picture.float() if picture.is_floating_point() else picture).numpy(force=True)
    else:
        array = picture
    is_first = array.ndim == 3 and array.shape[0] == 3
    if is_first and (array.shape[-1] != 3 or isinstance(picture, Tensor)):
        array = array.transpose(1, 2, 0)
    if array.ndim != 3 or array.shape[-1] != 3 or 0 in array.shape:
        raise ValueError(
            f"an image of shape {tuple(picture.shape)} has no 3 channels; give (H, W, 3) or "
            "(3, H, W)"
        )
    if array.dtype != np.uint8:
        array = _bytes(array)
    return Image.fromarray(np.ascontiguousarray(array))


def _bytes(array: Any) -> Any:
    """Convert floats in [0, 1] (up to rounding) to bytes. Raises ValueError for other numbers."""
    is_float = np.issubdtype(array.dtype, np.floating)
    inside = (array >= -HALF_LEVEL) & (array <= 1 + HALF_LEVEL)
    if not is_float or not bool(inside.all()):
        raise ValueError(
            f"an image of {array.dtype} has values {array.min()} to {array.max()}; give bytes "
            "(uint8), or floats in [0, 1]"
        )
    return np.rint(array.clip(0, 1) * 255).astype(np.uint8)


def crop_center(picture: Image.Image, area: float) -> Image.Image:
    """Crop the central `area` of an image (side sqrt(area), subpixel) and resize it back."""
    (width, height), side = picture.size, math.sqrt(area)
    left, top = (1 - side) / 2 * width, (1 - side) / 2 * height
    box = (left, top, left + side * width, top + side * height)
    return picture.resize(picture.size, Image.Resampling.BILINEAR, box=box)


def letterbox(picture: Image.Image, fill: Sequence[int]) -> Image.Image:
    """Pad an image to a square on both sides, rounding down."""
    (width, height), side = picture.size, max(picture.size)
    across, down = (side - width) // 2, (side - height) // 2
    padded: Image.Image = functional.pad(picture, [across, down, across, down], fill=list(fill))
    return padded
