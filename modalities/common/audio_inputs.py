"""Audio as the processors of models take it: their sampling rate, and the window they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from torch import Tensor
from transformers import FeatureExtractionMixin

from mmspec.modalities.common.sound import Sound, read

MAX_SECONDS = 1800.0  # of a recording that is sent: 115 MB of samples at 16 kHz
_EXTRACTORS = ("feature_extractor", "audio_processor")  # attributes of processors
_FEATURES = ("input_features", "input_values")


def find_feature_extractor(processor: Any) -> Any | None:
    """The feature extractor of a processor; None for a processor without audio."""
    if isinstance(processor, FeatureExtractionMixin):
        return processor
    attributes = vars(processor)
    return next((attributes[name] for name in _EXTRACTORS if name in attributes), None)


def feature_extractor(processor: Any) -> Any:
    """The feature extractor of a processor. Raises ValueError for a processor without audio."""
    found = find_feature_extractor(processor)
    if found is None:
        raise ValueError(
            f"a {type(processor).__name__} extracts no audio features; give processor= that of "
            "the recogniser"
        )
    return found


def rate_hz(processor: Any) -> int:
    """The sampling rate that a processor requires, in Hz."""
    return int(feature_extractor(processor).sampling_rate)


def window_seconds(processor: Any) -> float:
    """The length of a window in seconds; infinite where audio is not split into windows."""
    made = feature_extractor(processor)
    samples = vars(made).get("n_samples")
    return samples / made.sampling_rate if samples else float("inf")


def check_windows(processor: Any, sounds: Sequence[Sound], made: Mapping[str, Any]) -> None:
    """Refuse recordings of which the processor read the first window alone. Raises ValueError."""
    window, longest = window_seconds(processor), max(sound.seconds for sound in sounds)
    features = next((made[name] for name in _FEATURES if name in made), None)
    is_single = isinstance(features, Tensor) and len(features) == len(sounds)
    if longest > window and is_single:
        raise ValueError(
            f"a recording of {longest:.1f} s is longer than the {window:g} s that a "
            f"{type(processor).__name__} reads; give it in pieces"
        )


def read_sounds(processor: Any, files: Sequence[bytes]) -> tuple[Sound, ...]:
    """Recordings from the bytes of their files, at the rate of the processor.

    Raises ValueError for what is not audio, and for more than `MAX_SECONDS`.
    """
    rate = rate_hz(processor)
    return tuple(read(BytesIO(one), "the audio", MAX_SECONDS).at(rate) for one in files)
