"""ANPD: an n-gram model of the text itself drafts token by token, longest n-grams first.

Ou et al. 2024. The n-grams of prompt and output are counted as the text grows; the next token is
the most frequent one after the longest known n-gram of up to `longest` tokens. Exact; no draft
model.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.lookup.backoff import backoff
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=backoff,
    execution=Chain(Fixed(7)),
    verifier=Coupled(),
    options={"longest": 5},
    least={"longest": 2},
    paper="Ou et al. 2024",
)
