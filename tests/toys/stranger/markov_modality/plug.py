"""The heavy half: how a chain is loaded and bound to a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markov_modality.loading import chain
from markov_modality.model import MarkovChain
from markov_modality.session import session

__all__ = ["load", "session"]


def load(source: str | Path, **options: Any) -> MarkovChain:
    """A chain from its folder or "zoo:NAME"."""
    return chain(source)
