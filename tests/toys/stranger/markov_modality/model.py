"""A Markov chain: a table of distributions, in a folder like any other model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


class MarkovChain:
    """States 0 to V - 1; row i of `table` (V, V) is the distribution after state i."""

    def __init__(self, table: Tensor, name_or_path: str = "") -> None:
        if table.dim() != 2 or table.shape[0] != table.shape[1]:
            raise ValueError(f"a table of {tuple(table.shape)} is not square; give one row a state")
        self.table, self.name_or_path = table / table.sum(-1, keepdim=True), name_or_path

    @property
    def states(self) -> int:
        return len(self.table)

    @classmethod
    def random(cls, states: int, seed: int) -> MarkovChain:
        """A chain of random distributions."""
        noise = torch.Generator().manual_seed(seed)
        return cls(torch.rand(states, states, generator=noise) + 0.05)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> MarkovChain:
        """Raises ValueError where the folder holds no chain."""
        if not is_chain(Path(folder)):
            raise ValueError(f"{folder} holds no Markov chain; give a folder of save_pretrained")
        return cls(load_file(Path(folder) / "model.safetensors")["table"], str(folder))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write configuration and table."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        config = {"model_type": "markov", "architectures": ["MarkovChain"], "states": self.states}
        (place / "config.json").write_text(json.dumps(config) + "\n")
        save_file({"table": self.table.contiguous()}, place / "model.safetensors")


def is_chain(folder: Path) -> bool:
    """Whether a folder says that it holds one."""
    config = folder / "config.json"
    return config.exists() and json.loads(config.read_text()).get("model_type") == "markov"
