"""Load chains: from folders, and as `mmspec.zoo.load` asks for its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markov_modality.model import MarkovChain
from mmspec import zoo
from mmspec.modality import Entry


def chain(source: str | Path) -> MarkovChain:
    """A chain from its folder or "zoo:NAME"."""
    name = str(source)
    folder = zoo.path(name.removeprefix("zoo:")) if name.startswith("zoo:") else Path(name)
    return MarkovChain.from_pretrained(folder)


def load(entry: Entry, folder: Path, dtype: Any = None) -> MarkovChain:
    """A checkpoint of this package."""
    return MarkovChain.from_pretrained(folder)


def processor(entry: Entry, folder: Path) -> Any:
    """Raises ValueError: there is none."""
    raise ValueError(f"{entry.name} reads no words, so it has no processor; give start= a state")
