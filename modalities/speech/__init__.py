"""Speech: one folder, two modalities. `recognition` writes what is said, `synthesis` says it."""

from __future__ import annotations

from mmspec.modalities.speech import recognition, synthesis
from mmspec.modality import Modality

MODALITIES: tuple[Modality, ...] = (recognition.MODALITY, synthesis.MODALITY)
