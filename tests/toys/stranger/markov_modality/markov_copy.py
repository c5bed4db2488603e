"""A draft chain walks ahead under the target's own noise; exact.

The stranger's recipe: found by its entry point, in a package that mmspec does not know.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markov_modality.loading import chain
from markov_modality.model import MarkovChain, is_chain
from markov_modality.walking import AnotherChain, ChainTable
from mmspec.draft import Drafter
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.shapes import Chain
from mmspec.recipe import DraftModelKind, Kit, Recipe
from mmspec.verifiers.coupled import Coupled


@dataclass(frozen=True)
class DraftChainKind(DraftModelKind):
    """A Markov chain over the same states."""

    description: str = "draft chain"

    def accepts(self, model: Any) -> bool:
        return isinstance(model, MarkovChain)

    def owns(self, folder: Path) -> bool:
        return is_chain(folder)

    def load(self, source: str | Path, target: ChainTable, dtype: Any = None) -> MarkovChain:
        return chain(source)

    def read(self, model: MarkovChain, target: ChainTable, sees: str) -> MarkovChain:
        if model.states != target.model.states:
            raise ValueError(
                f"the draft chain has {model.states} states and the target {target.model.states}; "
                "give a chain over the same states"
            )
        return model

    def random(self, target: ChainTable, seed: int) -> MarkovChain:
        return MarkovChain.random(target.model.states, seed)


def another_chain(kit: Kit) -> Drafter:
    """The draft chain, `length` states a round."""
    assert kit.drafter is not None
    if not isinstance(kit.shape.length, Fixed):
        raise ValueError("a draft chain walks a fixed number of states; give length= a number")
    return AnotherChain(kit.drafter.model, kit.drafter.temperature, kit.shape.length.max_length)


RECIPE = Recipe(
    architecture=another_chain,
    execution=Chain(Fixed(3)),
    verifier=Coupled(),
    draft_model=(DraftChainKind(),),
    decodes="states",
    paper="none: a test of strangers",
)
