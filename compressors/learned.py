"""Compressors with trained parameters: how they are built, saved, read, and refused without.

folder/compressor.json           class, parameters and width
folder/compressor.safetensors    the weights
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmspec.compressors.contract import Compressed, Compressor, Features, Grid
from mmspec.declared import answered_by
from mmspec.errors import reading
from mmspec.models.folder import configuration

WEIGHTS, CONFIG = "compressor.safetensors", "compressor.json"
OWN = ("weights", "untrained", "seed")  # where the parameters come from; not what they are


@dataclass(frozen=True, kw_only=True)
class Learned(Compressor):
    """The design of a network that thins; `fitted` makes or reads one for the width at hand.

    `weights` is a folder that `save` wrote. Without it there are initial weights only, from
    `seed`, which are refused unless `untrained` says that they are meant.
    """

    weights: str | None = None
    untrained: bool = False
    seed: int = 0

    @abstractmethod
    def network(self, width: int) -> nn.Module:
        """A network of initial weights: called with (Features, signals), it gives Compressed."""

    def fitted(self, width: int, like: Tensor) -> Compressor:
        if self.weights is None and not self.untrained:
            raise ValueError(
                f"{type(self).__name__} has trained parameters, and none were given; give "
                "weights=FOLDER written by mmspec.compressors.learned.save, or untrained=True to "
                "use initial ones"
            )
        network = initial(self, width) if self.weights is None else load(self, width)
        return Fitted(self, network.to(like.device, like.dtype).eval().requires_grad_(False))

    def compress(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        raise ValueError(
            f"{type(self).__name__} is a design without parameters; call fitted(width, like) first"
        )


@dataclass(frozen=True, eq=False)
class Fitted(Compressor):
    """A learned compressor with its network."""

    design: Learned
    network: nn.Module

    needs = answered_by("design.needs")
    places = answered_by("design.places")

    def count(self, features: int, grid: Grid | None = None) -> int | None:
        return self.design.count(features, grid)

    def compress(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        thin: Compressed = self.network(features, signals)
        return thin


def initial(design: Learned, width: int) -> nn.Module:
    """A network with the initial weights of the design's seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(design.seed)
        return design.network(width)


def save(folder: str | Path, design: Learned, network: nn.Module, width: int) -> None:
    """Write a trained network for features of `width`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.contiguous() for name, weight in network.state_dict().items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    content = {"class": type(design).__name__, "width": width, "parameters": _parameters(design)}
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n")


def load(design: Learned, width: int) -> nn.Module:
    """The network in `design.weights`. Raises ValueError for one of another design or width."""
    folder = Path(str(design.weights))
    if not (folder / CONFIG).exists() or not (folder / WEIGHTS).exists():
        raise ValueError(
            f"{folder} has no {CONFIG} and {WEIGHTS}; write them with "
            "mmspec.compressors.learned.save"
        )
    content = configuration(folder / CONFIG)
    with reading(folder, "compressor"):
        tensors = load_file(folder / WEIGHTS)
    mine = {"class": type(design).__name__, "width": width, "parameters": _parameters(design)}
    for name, value in mine.items():
        if content.get(name) != value:
            raise ValueError(
                f"the compressor in {folder} has {name} {content.get(name)}, but {value} is wanted "
                "here; choose it with its own parameters, or train one for this model"
            )
    network = initial(design, width)
    with reading(folder, "compressor"):
        network.load_state_dict(tensors)
    return network


def _parameters(design: Learned) -> dict[str, Any]:
    own = [one.name for one in fields(design) if one.name not in OWN]
    return {name: getattr(design, name) for name in own}
