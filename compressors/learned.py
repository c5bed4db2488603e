"""Compressors with trained parameters: construction, files, and shared modules.

folder/compressor.json           class, parameters and width folder/compressor.safetensors    the
weights
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
from torch.nn import functional

from mmspec._attributes import delegate_to
from mmspec.compressors.cells import CellCompressor
from mmspec.compressors.contract import Compressed, Compressor, Features, Grid
from mmspec.errors import explain_load_errors
from mmspec.models.folder import read_json

WEIGHTS, CONFIG = "compressor.safetensors", "compressor.json"
OWN = ("weights", "untrained", "seed")  # the source of the weights, not parameters of the design


@dataclass(frozen=True, kw_only=True)
class Learned(Compressor):
    """The design of a compressor network; `build` creates or loads it for a feature width.

    `weights` is a folder written by `save`. Without it there are only initial weights from `seed`,
    which raise an error unless `untrained` is set.
    """

    weights: str | None = None
    untrained: bool = False
    seed: int = 0

    @abstractmethod
    def network(self, width: int) -> nn.Module:
        """A network with initial weights that maps (Features, signals) to Compressed."""

    def build(self, width: int, like: Tensor) -> Compressor:
        if self.weights is None and not self.untrained:
            raise ValueError(
                f"{type(self).__name__} has trained parameters, and none were given; give "
                "weights=FOLDER written by mmspec.compressors.learned.save, or untrained=True to "
                "use initial ones"
            )
        network = initial(self, width) if self.weights is None else load(self, width)
        return BuiltCompressor(
            self, network.to(like.device, like.dtype).eval().requires_grad_(False)
        )

    def compress(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        raise ValueError(
            f"{type(self).__name__} is a design without parameters; call build(width, like) first"
        )


@dataclass(frozen=True, eq=False)
class BuiltCompressor(Compressor):
    """A learned compressor with its network."""

    design: Learned
    network: nn.Module

    needs = delegate_to("design.needs")
    position_rule = delegate_to("design.position_rule")

    def count(self, features: int, grid: Grid | None = None) -> int | None:
        return self.design.count(features, grid)

    def compress(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        thin: Compressed = self.network(features, signals)
        return thin


def initial(design: Learned, width: int) -> nn.Module:
    """A network with initial weights from the design's seed."""
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
    """Load the network in `design.weights`. Raises ValueError for another design or width."""
    folder = Path(str(design.weights))
    if not (folder / CONFIG).exists() or not (folder / WEIGHTS).exists():
        raise ValueError(
            f"{folder} has no {CONFIG} and {WEIGHTS}; write them with "
            "mmspec.compressors.learned.save"
        )
    content = read_json(folder / CONFIG)
    with explain_load_errors(folder, "compressor"):
        tensors = load_file(folder / WEIGHTS)
    mine = {"class": type(design).__name__, "width": width, "parameters": _parameters(design)}
    for name, value in mine.items():
        if content.get(name) != value:
            raise ValueError(
                f"the compressor in {folder} has {name} {content.get(name)}, but {value} is "
                "required here; select it with its own parameters, or train one for this model"
            )
    network = initial(design, width)
    with explain_load_errors(folder, "compressor"):
        network.load_state_dict(tensors)
    return network


def _parameters(design: Learned) -> dict[str, Any]:
    own = [one.name for one in fields(design) if one.name not in OWN]
    return {name: getattr(design, name) for name in own}


class Attention(nn.Module):
    """Multi-head attention without a mask: linear maps of queries, keys, values and the output."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, queries: Tensor, inputs: Tensor) -> Tensor:  # (m, H), (n, H) -> (m, H)
        query, key, value = (
            one.unflatten(-1, (self.heads, -1))
            for one in (self.query(queries), self.key(inputs), self.value(inputs))
        )
        found: Tensor = self.out(attend(query, key, value))
        return found


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax attention of (m, heads, d) over (n, heads, d); gives (m, heads * d)."""
    query, key, value = (one.transpose(0, 1) for one in (query, key, value))
    found = functional.scaled_dot_product_attention(query, key, value)
    return found.transpose(0, 1).flatten(1)


def check_queries(queries: int, heads: int = 1) -> None:
    """Check the numbers of queries and heads. Raises ValueError below 1."""
    if queries < 1 or heads < 1:
        raise ValueError(f"queries={queries}, heads={heads}: give at least 1 of each")


def check_heads(width: int, heads: int) -> None:
    """Check that the heads divide the width. Raises ValueError otherwise."""
    if width % heads:
        raise ValueError(f"heads={heads} does not divide the features' width of {width}")


def place_queries(outputs: Tensor, features: Features, last: bool) -> Compressed:
    """Place the outputs of m queries at the first or the last m slots of the image, in order.

    An image with fewer slots than queries uses as many queries as it has slots.
    """
    count = min(len(outputs), len(features.values))
    slots = slice(len(features.values) - count, None) if last else slice(count)
    positions = features.positions[slots]
    size = max(len(features.values) // max(count, 1), 1)  # equal shares
    return Compressed(outputs[:count], positions, torch.full_like(positions, size))


@dataclass(frozen=True)
class LearnedCells(CellCompressor, Learned):
    """A learned map of every cell of `stride` x `stride` features."""
