"""Speech: one folder, three modalities.

`recognition` writes what is said; `synthesis` and `frames` say it, in codes of one codebook or of
several.
"""

from __future__ import annotations

from mmspec.modalities.speech import frames, recognition, synthesis
from mmspec.modality import Modality

MODALITIES: tuple[Modality, ...] = (recognition.MODALITY, synthesis.MODALITY, frames.MODALITY)
