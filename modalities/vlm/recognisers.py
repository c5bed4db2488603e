"""Speech models: encoder-decoder recognisers."""

from __future__ import annotations

from collections.abc import Mapping

from mmspec.targets.family import Family

FAMILIES: Mapping[str, Family] = {"whisper": Family("Whisper", media=("input_features",))}
