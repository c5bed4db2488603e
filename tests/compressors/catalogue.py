"""Images, signals and settings on which every compressor is tested."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.compressors import COMPRESSORS, describe, parse_compressor
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
PICTURED = [name for name in COMPRESSORS if not OF_ROBOTS & {*describe(name)["needs"]}]
WIDTH, STATES, QUESTION = 8, 6, 3


def neutral() -> list[Compressor]:
    """All compressors that can keep everything, in that setting."""
    settings = {name: NEUTRAL.get(name, "keep=1.0") for name in COMPRESSORS}
    return [parse_compressor(f"{name}:{own}") for name, own in settings.items() if own is not None]


def usual() -> list[Compressor]:
    """Every compressor with default parameters, and with initial weights if trained."""
    return [parse_compressor(spell_name(name)) for name in COMPRESSORS]


def image_compressors(listed: list[Compressor]) -> list[Compressor]:
    """Compressors that do not need the episodes of a robot."""
    return [one for one in listed if not one.needs & OF_ROBOTS]


def spell_name(name: str) -> str:
    """A compressor name with its required parameters."""
    return f"{name}:untrained=true" if describe(name)["trained"] else name


def random_features(grid: tuple[int, ...] | None, width: int = WIDTH) -> Features:
    """Random features whose slots have a gap, as between the lines of Pixtral."""
    count = 21 if grid is None else int(torch.tensor(grid).prod())
    slots = 7 + torch.arange(count) + (torch.arange(count) >= count // 2)
    return Features(torch.randn(count, width), slots, grid)


def signals(count: int, width: int = WIDTH) -> dict[str, Tensor]:
    """All signals, for an image of `count` features."""
    given = {
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
    assert set(given) == set(SIGNALS)
    return given


def compress(compressor: Compressor, features: Features) -> Compressed:
    """Compress with the signals that the compressor needs."""
    given = signals(len(features.values))
    compressor = compressor.build(features.values.shape[1], features.values)
    return compressor.compress(features, {name: given[name] for name in compressor.needs})
