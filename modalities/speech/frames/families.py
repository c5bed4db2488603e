"""Which models of several codebooks are read here, and why others are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmspec import _hf
from mmspec.modalities.speech.frames.csm import CsmReader
from mmspec.modalities.speech.frames.musicgen import MusicgenReader

_READERS: Mapping[str, Any] = {
    "musicgen": MusicgenReader,
    "musicgen_melody": lambda model: MusicgenReader(model, _hf.encode_melody),
    "csm": CsmReader,
}
_WHY = {
    "dia": "its end of speech goes through the channels by processors with a state",
    "moshi": "it hears another voice while it speaks, and its depth decoder has weights per book",
    "higgs_audio_v2": "it changes between text and frames while it speaks",
}


def reader(model: Any) -> Any:
    """What reads a model. Raises ValueError for a family that cannot be read yet."""
    kind = model.config.model_type
    if kind not in _READERS:
        why = _WHY.get(kind, "nobody knows how its codebooks hang together")
        raise ValueError(
            f"{type(model).__name__} ({kind}) is not sped up: {why}; use model.generate(), or a "
            f"model of {', '.join(_READERS)}"
        )
    return _READERS[kind](model)
