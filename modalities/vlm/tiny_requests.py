"""Requests for any small model: text, and the media that its forward takes.

The processor of a family is not available without its files, so images and sounds are tried in the
known formats (flat patches with grids, whole images, tiles) until the model's encoder accepts one;
the prompt then gets as many placeholders as there are features.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mmspec import _hf
from mmspec.modalities.vlm.tiny_configs import VOCAB

WORDS = range(4, 90)
BEFORE, BEHIND = 5, 14
RAGGED = 3  # tokens that the second row of a ragged batch is shorter
_PLACEHOLDERS = {
    "image": (
        "image_token_id",
        "image_token_index",
        "image_patch_id",
        "media_placeholder_token_id",
    ),
    "audio": ("audio_token_id", "audio_token_index"),
}

Request = dict[str, Any]


def requests(model: Any, rows: int, seed: int = 0) -> Iterator[Request]:
    """Iterate over requests of `rows` rows: with media first, text alone last."""
    noise = torch.Generator().manual_seed(seed)
    names = _hf.forward_names(model)
    if model.config.is_encoder_decoder:
        yield from _for_encoders(model, names, rows, noise)
        return
    for kind, media in (*_pictures(model, names, noise), *_sounds(model, names, noise)):
        for count_features in (_count_features, _probe_feature_count, _count_pooled_frames):
            try:
                count = count_features(model, kind, media)
            except Exception:  # the encoder takes another formatat, or needs another way to count
                continue
            yield _request(model, names, rows, noise, kind, count, media)
            break
    yield _request(model, names, rows, noise, "text", 0, {})


def _request(
    model: Any,
    names: frozenset[str],
    rows: int,
    noise: torch.Generator,
    kind: str,
    count: int,
    media: Mapping[str, Tensor],
) -> Request:
    mark = placeholder(model, kind)
    lines = []
    for row in range(rows):
        before, behind = _words(BEFORE, noise), _words(BEHIND - RAGGED * (row % 2), noise)
        lines.append([*before, *([mark] * count), *behind])
    width = max(map(len, lines))
    ids = torch.tensor([[0] * (width - len(line)) + line for line in lines])
    mask = torch.tensor([[0] * (width - len(line)) + [1] * len(line) for line in lines])
    made: Request = {"input_ids": ids, "attention_mask": mask}
    types = (ids == mark).long() if count else torch.zeros_like(ids)
    if "mm_token_type_ids" in names:
        made["mm_token_type_ids"] = types * (3 if kind == "audio" else 1)
    if "token_type_ids" in names and model.config.get_text_config(decoder=True) is not model.config:
        made["token_type_ids"] = types
    own = {name: torch.cat([value] * rows) for name, value in media.items()}
    if "aspect_ratio_mask" in media:
        seen = torch.ones(rows, width, 1, media["aspect_ratio_mask"].shape[-1], dtype=torch.int64)
        own["cross_attention_mask"] = seen
    return {**made, **own}


def placeholder(model: Any, kind: str) -> int:
    """Return the placeholder id of a kind of media; -1 if the config has none."""
    for name in _PLACEHOLDERS.get(kind, ()):
        found = getattr(model.config, name, None)
        if found is not None:
            return int(found)
    return -1


def _words(count: int, noise: torch.Generator) -> list[int]:
    ids: list[int] = torch.randint(WORDS.start, WORDS.stop, (count,), generator=noise).tolist()
    return ids


def _count_features(model: Any, kind: str, media: Mapping[str, Tensor]) -> int:
    """Count the features that the model's encoder makes of an image or a sound."""
    names = {"image": "get_image_features", "audio": "get_audio_features"}
    encode = getattr(model, names[kind], None) or getattr(model.model, names[kind])
    with torch.no_grad():
        out = encode(**media, return_dict=True)
    found = out if isinstance(out, Tensor | list | tuple) else out.pooler_output
    width = model.get_input_embeddings().weight.shape[1]
    parts = [found] if isinstance(found, Tensor) else list(found)
    if isinstance(parts[0], list | tuple):
        parts = [piece for part in parts for piece in part]
    return int(sum(part.numel() for part in parts)) // int(width)


def _probe_feature_count(model: Any, kind: str, media: Mapping[str, Tensor]) -> int:
    """Read the number of features from the error message for a single placeholder."""
    names = _hf.forward_names(model)
    request = _request(model, names, 1, torch.Generator(), kind, 1, media)
    try:
        with torch.no_grad():
            model.generate(**request, max_new_tokens=1, do_sample=False)
    except (ValueError, RuntimeError) as error:
        found = re.search(r"features: (\d+)", str(error))
        if found is None:
            raise
        return int(found[1])
    return 1


def _count_pooled_frames(model: Any, kind: str, media: Mapping[str, Tensor]) -> int:
    """Count the features of a sound: a quarter of its frames."""
    del model
    if kind != "audio":
        raise ValueError("images have no frames")
    return next(iter(media.values())).shape[-1] // 4


def _pictures(
    model: Any, names: frozenset[str], noise: torch.Generator
) -> Iterator[tuple[str, Request]]:
    """Iterate over the formats of one image."""
    vision = getattr(model.config, "vision_config", None)
    if vision is None or not any("pixel" in name or "image" in name for name in names):
        return
    channels = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", 3) or 3
    patch = getattr(vision, "patch_size", None) or 14
    patch = patch if isinstance(patch, int) else patch[0]
    size = getattr(vision, "image_size", None) or 4 * patch
    size = size if isinstance(size, int) else size[0]
    made = (
        *_flat(names, patch, channels, getattr(vision, "temporal_patch_size", 1) or 1, noise),
        *_whole(model, names, size, channels, noise),
    )
    yield from (("image", media) for media in made)


def _flat(
    names: frozenset[str], patch: int, channels: int, time: int, noise: torch.Generator
) -> Iterator[Request]:
    """Iterate over formats of sixteen flat patches and their grid."""
    inner = channels * patch * patch
    if "image_grid_thw" in names:
        grid = {"image_grid_thw": torch.tensor([[1, 4, 4]])}
        merged = {"image_merge_sizes": torch.tensor([2])} if "image_merge_sizes" in names else {}
        for width in (time * inner, inner, 2 * inner):
            yield {"pixel_values": torch.randn(16, width, generator=noise), **grid, **merged}
        pixels = torch.randn(16, channels, patch, patch, generator=noise)
        yield {"pixel_values": pixels, **grid}
    if "spatial_shapes" in names:
        seen = torch.ones(1, 16, dtype=torch.int64)
        pixels = torch.randn(1, 16, inner, generator=noise)
        shape = {"spatial_shapes": torch.tensor([[4, 4]]), "pixel_attention_mask": seen}
        yield {"pixel_values": pixels, **shape}


def _whole(
    model: Any, names: frozenset[str], size: int, channels: int, noise: torch.Generator
) -> Iterator[Request]:
    """Iterate over formats of a whole image, or its tiles."""

    def picture(*tiles: int, side: int = size) -> Tensor:
        return torch.randn(1, *tiles, channels, side, side, generator=noise)

    extras = {"image_sizes": torch.tensor([[size, size]])} if "image_sizes" in names else {}
    if "high_res_pixel_values" in names:
        side = model.config.high_res_vision_config.image_size
        yield {"pixel_values": picture(), "high_res_pixel_values": picture(side=side)}
    if "aspect_ratio_ids" in names:
        kinds = {"aspect_ratio_ids": torch.ones(1, 1, dtype=torch.int64)}
        tiles = model.config.vision_config.max_num_tiles
        kinds["aspect_ratio_mask"] = torch.ones(1, 1, tiles, dtype=torch.int64)
        yield {"pixel_values": picture(1, tiles), **kinds}
    if "pixel_attention_mask" in names:
        seen = torch.ones(1, 1, size, size, dtype=torch.int64)
        yield {"pixel_values": picture(1), "pixel_attention_mask": seen}
    yield {"pixel_values": picture(), **extras}
    if extras:
        yield {"pixel_values": picture()}
        twice = torch.tensor([[2 * size, 2 * size]])
        yield {"pixel_values": picture(side=2 * size), "image_sizes": twice}
        for count in (2, 3, 5):
            yield {"pixel_values": picture(count), **extras}
    yield {"pixel_values": picture(2)}
    yield {"pixel_values": picture(1)}


def _sounds(
    model: Any, names: frozenset[str], noise: torch.Generator
) -> Iterator[tuple[str, Request]]:
    """Iterate over the formats of one sound."""
    if "input_features" not in names:
        return
    masks = [name for name in _FRAMES if name in names]
    for bands in (80, 128):
        for length in (64, 80, 3000):
            sound = torch.randn(1, bands, length, generator=noise)
            for value in (sound, sound.transpose(1, 2)):
                seen = dict.fromkeys(masks, torch.ones(1, length, dtype=torch.int64))
                yield "audio", {"input_features": value, **seen}
                if masks:
                    yield "audio", {"input_features": value}


_FRAMES = ("feature_attention_mask", "input_features_mask", "padding_mask")


def _for_encoders(
    model: Any, names: frozenset[str], rows: int, noise: torch.Generator
) -> Iterator[Request]:
    """Iterate over inputs of an encoder: text, an image or a sound."""
    for kind, media in _pictures(model, names, noise) if "input_ids" in names else ():
        try:
            count = _count_features(model, kind, media)
        except Exception:  # the encoder takes another format
            continue
        yield _request(model, names, rows, noise, kind, count, media)
    if "pixel_values" in names:
        yield {"pixel_values": torch.randn(rows, 3, 64, 64, generator=noise)}
    for bands in (80, 128):
        if "input_features" in names:
            yield {"input_features": torch.randn(rows, bands, 80, generator=noise)}
            yield {"input_features": torch.randn(rows, 80, bands, generator=noise)}
    if "input_values" in names:
        yield {"input_values": torch.randn(rows, 4000, generator=noise)}
    if "input_ids" in names:
        ids = torch.randint(WORDS.start, WORDS.stop, (rows, BEHIND), generator=noise)
        mask = torch.ones_like(ids)
        for row in range(1, rows):
            ids[row, -RAGGED:], mask[row, -RAGGED:] = 1, 0
        yield {"input_ids": ids, "attention_mask": mask}


assert max(WORDS) < VOCAB
