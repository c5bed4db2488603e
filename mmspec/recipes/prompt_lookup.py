"""Prompt lookup: copy what followed the last tokens the last time they appeared.

Saxena 2023 (PLD); the baseline that needs no draft model. Exact. Image placeholders are never
matched.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.lookup.prompt_lookup import prompt_lookup
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=prompt_lookup,
    execution=Chain(Fixed(10)),
    verifier=Coupled(),
    options={"longest": 3},
    least={"longest": 1},
    paper="Saxena 2023",
)
