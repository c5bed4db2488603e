"""Pictures that move, as files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

FRAME_MS, LAST_MS = 80, 2000


def save(file: Path, shown: Sequence[Image.Image]) -> None:
    """Write frames as a GIF or WebP that repeats, the last of them longer."""
    lasting = [FRAME_MS] * (len(shown) - 1) + [LAST_MS]
    shown[0].save(file, save_all=True, append_images=shown[1:], duration=lasting, loop=0)
