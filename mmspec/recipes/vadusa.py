"""VADUSA: multi-token heads draft a sparse tree of speech codes, and several samples may match it.

Li et al. 2024, "Fast and high-quality auto-regressive speech synthesis via speculative decoding".
Heads on the target's last state (Medusa) fill a static tree; `draws` tokens are sampled from the
target at each node, and a child among them is accepted. Lossy: a single child c has probability 1 -
(1 - p(c))^draws. draws=1 is exact, and so is greedy decoding. Reconstructed: the tree, ties, the
token after a miss, and the default of `draws`.
"""

from mmspec.draft import Verifier
from mmspec.drafters.neural.multi_token import MULTI_TOKEN_HEADS, SEES, multi_token_heads
from mmspec.drafters.shapes import StaticTree
from mmspec.recipe import Deferred, Kit, Recipe
from mmspec.trees import Tree
from mmspec.verifiers.multi_draw import MultiDraw

TREE = Tree.from_digits(
    "0 1 2 3 4 5 00 01 02 03 10 11 12 20 21 30 000 001 002 010 011 100 200 0000 0001 0010"
)


def multi_draw(kit: Kit) -> Verifier:
    """As many draws as the option says."""
    return MultiDraw(kit.options["draws"])


RECIPE = Recipe(
    architecture=multi_token_heads,
    execution=StaticTree(TREE),
    verifier=Deferred(multi_draw, "tree walk, a child among draws of the target"),
    optimisation="cross entropy of every head",
    sees=SEES,
    draft_model=(MULTI_TOKEN_HEADS,),
    options={"draws": 2},
    needs=("speech tokens",),
    paper="Li et al. 2024 (VADUSA)",
    reconstructed="the tree, ties, the token behind a miss, the number of draws",
)
