"""Pictures and sounds within a page."""

from __future__ import annotations

from base64 import b64decode
from io import BytesIO

import torch
from PIL import Image

from mmspec.tracing.media import find_peaks, image_uri, sound_uri


def read_image(uri: str) -> Image.Image:
    return Image.open(BytesIO(b64decode(uri.partition(",")[2])))


def test_media_are_small_and_whole() -> None:
    image = Image.effect_noise((700, 350), 40).convert("RGB")
    assert read_image(image_uri(image)).size == (512, 256)
    assert image_uri(Image.new("RGB", (8, 8), "red")).startswith("data:image/png")
    samples = torch.sin(torch.arange(4000) / 20) * 0.5
    peaks = find_peaks(samples)
    assert len(peaks) == 900
    assert max(high for _, high in peaks) == 1
    assert find_peaks(samples[:0]) == []
    data = b64decode(sound_uri(samples, 8000).partition(",")[2])
    assert len(data) == 44 + 2 * 4000
