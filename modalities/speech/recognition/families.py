"""Recognisers: the differences between their families that the models themselves do not tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmspec.modalities.common import readers
from mmspec.targets.readers.family import Family
from mmspec.targets.readers.reader import Reader

FAMILIES: Mapping[str, Family] = {"whisper": Family("Whisper", media=("input_features",))}


def reader(model: Any) -> Reader:
    """What reads a model: `EncoderDecoder`, or `Backbone` for language models that hear."""
    return readers.reader(model, FAMILIES)


def family(model: Any) -> Family:
    """The family of a model."""
    return readers.family(model, FAMILIES)
