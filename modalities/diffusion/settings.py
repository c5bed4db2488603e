"""What one call of a pipeline takes on the command line."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.modality import setting


@dataclass(frozen=True)
class DiffusionSettings:
    """How finely to draw; the pipeline's own way where nothing is said."""

    steps: int | None = setting(None, "Steps of the sampler.", min=2)
