"""Estimate the disk space of a feature cache, before the target runs."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from mmspec.targets.readers.hooks import wanted_layers
from mmspec.targets.readers.reader import Reader
from mmspec.training.feature_cache import FeatureCache
from mmspec.training.heads import TrainingExample
from mmspec.training.trainable import DrafterTraining


class _RequestedFeaturesError(Exception):
    """Raised with the name of the features that a loss reads."""

    def __init__(self, tap: str) -> None:
        super().__init__(tap)
        self.tap = tap


class _ProbeCache(FeatureCache):
    """An empty cache that raises the name of requested features."""

    def __init__(self) -> None:
        self.tap = None

    def contains(self, tap: str, question: int) -> bool:
        raise _RequestedFeaturesError(tap)


def required_features(training: DrafterTraining, reader: Reader, head: Any) -> str:
    """Return the name of the target features that a loss reads.

    Raises ValueError for drafters trained without them, or on more than they hold.
    """
    if not training.reads_states:
        raise ValueError(
            "a small model is trained on the target's tokens and not its states, so there is "
            "nothing to cache; drop --cache"
        )
    nothing = torch.zeros(1, 2, dtype=torch.int64, device=reader.device)
    try:
        training.loss(reader, head, TrainingExample({}, nothing, _ProbeCache(), (0,)))
    except _RequestedFeaturesError as requested:
        return requested.tap
    raise ValueError("this loss reads no states of the target; drop --cache")


def cache_bytes(reader: Reader, tap: str, sizes: Iterable[tuple[float, float]]) -> int:
    """Bytes of all rows, given their (prompt tokens, response tokens).

    Stored are the embedding and the features of every token, ids of prompts, and with features of
    layers also the last state of response tokens.
    """
    layers = len(wanted_layers({tap}).get(tap, ()))
    item_bytes = torch.empty((), dtype=reader.model.dtype).element_size()
    width = int(reader.config.hidden_size) * item_bytes
    token = width * (1 + max(layers, 1)) + 8 * reader.family.rope_axes + 4
    return int(sum((prompt + new) * token + new * width * bool(layers) for prompt, new in sizes))


def check_space(folder: Path, size: int, existing: Sequence[Path] = ()) -> None:
    """Refuse a cache larger than the free space plus `existing` files. Raises ValueError."""
    parent = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    free = shutil.disk_usage(parent).free + sum(one.stat().st_size for one in existing)
    if size > free:
        raise ValueError(
            f"the feature cache takes up to {size / 2**30:.1f} GiB and {parent} has "
            f"{free / 2**30:.1f}; give --cache a folder on another disk, or drop it"
        )
