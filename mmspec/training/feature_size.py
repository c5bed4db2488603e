"""How much disk a cache of features takes, before anything is read."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from mmspec.targets.readers.hooks import wanted_layers
from mmspec.targets.readers.reader import Reader
from mmspec.training.feature_cache import FeatureCache
from mmspec.training.heads import Lesson
from mmspec.training.trainable import DrafterTraining


class _AskedFeaturesError(Exception):
    """A loss asked for these."""

    def __init__(self, tap: str) -> None:
        super().__init__(tap)
        self.tap = tap


class _Asking(FeatureCache):
    """Holds nothing, and says what it is asked for."""

    def __init__(self) -> None:
        self.tap = None

    def known(self, tap: str, question: int) -> bool:
        raise _AskedFeaturesError(tap)


def wanted_features(training: DrafterTraining, reader: Reader, head: Any) -> str:
    """The name of the features that a loss reads of the target.

    Raises ValueError for a drafter that is taught without them, or by more than they hold.
    """
    if not training.reads_states:
        raise ValueError(
            "a small model is taught what the target answers and not its states, so there is "
            "nothing to cache; drop --cache"
        )
    nothing = torch.zeros(1, 2, dtype=torch.int64, device=reader.device)
    try:
        training.loss(reader, head, Lesson({}, nothing, _Asking(), (0,)))
    except _AskedFeaturesError as asked:
        return asked.tap
    raise ValueError("this loss reads no states of the target; drop --cache")


def cache_bytes(reader: Reader, tap: str, sizes: Iterable[tuple[float, float]]) -> int:
    """Bytes of all rows, of so many tokens of prompt and answer each.

    A token has its embedding and its features, and one of an answer the last state beside those of
    layers.
    """
    layers = len(wanted_layers({tap}).get(tap, ()))
    each = torch.empty((), dtype=reader.model.dtype).element_size()
    width = int(reader.config.hidden_size) * each
    token = width * (1 + max(layers, 1)) + 8 * reader.family.rope_axes
    return int(sum((prompt + said) * token + said * width * bool(layers) for prompt, said in sizes))


def check_space(folder: Path, size: int, there: Sequence[Path] = ()) -> None:
    """Refuse a cache that the disk has no room for, beside the files `there`. Raises ValueError."""
    home = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    free = shutil.disk_usage(home).free + sum(one.stat().st_size for one in there)
    if size > free:
        raise ValueError(
            f"the feature cache takes up to {size / 2**30:.1f} GiB and {home} has "
            f"{free / 2**30:.1f}; give --cache a folder on another disk, or drop it"
        )
