"""Pictures, signals and settings on which every compressor of the shelf is tried."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.compressors import COMPRESSORS, about, named
from mmspec.compressors.contract import OF_ROBOTS, SIGNALS, Compressed, Compressor, Features

GRIDS = [(4, 6), (5, 3), (1, 1), (3, 2, 4), None]
# at its own settings, and at one by which nothing is lost
NEUTRAL = {
    "conv": "stride=1,untrained=true",
    "elastic-gate": "branch=prune,keep=1.0,untrained=true",
    "latent": None,
    "q-former": None,
    "resampler": None,
    "space-to-depth": "stride=1,untrained=true",
    "action-prune": "limit=1.0",
    "average-pool": "stride=1",
    "hide-all": None,
    "similarity-prune": "keep=1.0,limit=1.0",
    "temporal-redundancy": "limit=1.0",
    "identity": "",
}
# without those that go by what a robot saw before
PICTURED = [name for name in COMPRESSORS if not OF_ROBOTS & {*about(name)["needs"]}]
WIDTH, STATES, QUESTION = 8, 6, 3


def neutral() -> list[Compressor]:
    """All that can keep everything, doing so."""
    settings = {name: NEUTRAL.get(name, "keep=1.0") for name in COMPRESSORS}
    return [named(f"{name}:{own}") for name, own in settings.items() if own is not None]


def usual() -> list[Compressor]:
    """Every compressor, as it comes; with initial weights where it has some."""
    return [named(spoken(name)) for name in COMPRESSORS]


def pictured(listed: list[Compressor]) -> list[Compressor]:
    """Those that go by nothing that a robot saw before."""
    return [one for one in listed if not one.needs & OF_ROBOTS]


def spoken(name: str) -> str:
    """A name with what must be said beside it."""
    return f"{name}:untrained=true" if about(name)["trained"] else name


def picture(grid: tuple[int, ...] | None, width: int = WIDTH) -> Features:
    """A random picture whose slots have a gap, as between the lines of Pixtral."""
    count = 21 if grid is None else int(torch.tensor(grid).prod())
    slots = 7 + torch.arange(count) + (torch.arange(count) >= count // 2)
    return Features(torch.randn(count, width), slots, grid)


def signals(count: int, width: int = WIDTH) -> dict[str, Tensor]:
    """Every signal there is, for a picture of `count` features."""
    told = {
        "attention": torch.rand(count),
        "question-attention": torch.rand(count),
        "last-layer-attention": torch.rand(count),
        "cls": torch.rand(count),
        "text": torch.randn(QUESTION, width),
        "states": torch.randn(2, count, STATES),
        "question-states": torch.randn(2, QUESTION, STATES),
        "earlier-attention": torch.rand(count),
        "earlier-features": torch.randn(count, width),
        "precision": torch.ones(1),
    }
    assert set(told) == set(SIGNALS)
    return told


def compress(compressor: Compressor, features: Features) -> Compressed:
    """With those of the signals that it needs."""
    told = signals(len(features.values))
    compressor = compressor.fitted(features.values.shape[1], features.values)
    return compressor.compress(features, {name: told[name] for name in compressor.needs})
