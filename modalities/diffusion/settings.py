"""What one call of a pipeline takes on the command line."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.modality import setting


@dataclass(frozen=True)
class DiffusionSettings:
    """How finely to draw; the pipeline's own way where nothing is said."""

    steps: int | None = setting(None, "Steps of the sampler.", min=2)
    guidance: float | None = setting(None, "Scale of guidance.", min=0)
    words: int | None = setting(None, "Tokens of a prompt at most.", min=1)
    grid: str | None = setting(None, "A sheet of pictures, as in 4x4.", only="generate")
