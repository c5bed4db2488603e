"""Lookahead: Jacobi iterations beside the text find n-grams, which are verified when they recur.

Fu et al. 2024. One forward reads a window of `window` columns (W) and `ngram` - 1 levels (N), and
up to `guesses` n-grams (G) that began with the last token. Exact; no draft model. The defaults are
those of the paper for 7B models; with `read_prompt=False` only n-grams of the window are drafted.
Reconstructed: the window starts as tokens of the prompt, and takes coupled tokens when sampling.
"""

from mmspec.drafters.jacobi.lookahead import TwoBranches, lookahead
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=lookahead,
    execution=TwoBranches(),
    verifier=Coupled(),
    options={"window": 15, "ngram": 5, "guesses": 15, "read_prompt": True},
    least={"window": 1, "ngram": 3, "guesses": 1},
    paper="Fu et al. 2024",
    reconstructed="the first window, and coupled tokens in it when sampling",
)
