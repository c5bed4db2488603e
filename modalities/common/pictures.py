"""Pictures out of files."""

from __future__ import annotations

from pathlib import Path

from PIL import Image


def open_picture(source: str | Path) -> Image.Image:
    """A picture from a file. Raises ValueError naming what is damaged."""
    try:
        return Image.open(source).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(
            f"{source} is not a picture that can be read ({error}); give a PNG or JPEG file"
        ) from error
