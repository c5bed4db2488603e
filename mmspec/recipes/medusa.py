"""Medusa: heads on the target's last state say the tokens further ahead, and fill a static tree.

Cai et al. 2024, "Medusa: simple LLM inference acceleration framework with multiple decoding heads".
The drafter is `mmspec.models.heads.medusa.MedusaHeads`, trained beside a frozen target by
`mmspec.training.ahead.MEDUSA`; heads hear neither each other nor the tokens between. The tree
is the published one of 63 nodes, up to 10 wide. Exact: greedy and sampled output is plain
decoding's. The paper's own rule for sampling, which is lossy, is
`verifier=Longest(Typical(epsilon=0.09, delta=0.3))`, and what recipe `typical` verifies these heads
by. Reconstructed: coupled noise for sampling; head i counts 0.8^(i + 1) in training.
"""

from mmspec.drafters.growth import StaticTree
from mmspec.drafters.neural.multi_token import MEDUSA_HEADS, SEES, multi_token_heads
from mmspec.recipe import Recipe
from mmspec.training.ahead import MEDUSA
from mmspec.trees import Tree
from mmspec.verifiers.coupled import Coupled

TREE = Tree.of_digits(
    "0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 30 31 40 "
    "50 60 70 80 90 000 001 002 003 004 005 006 007 008 009 010 011 012 020 021 030 040 050 "
    "060 070 100 101 200 0000 0001"
)
RECIPE = Recipe(
    architecture=multi_token_heads,
    execution=StaticTree(TREE),
    verifier=Coupled(),
    optimisation="cross entropy of every head",
    sees=SEES,
    draft_model=(MEDUSA_HEADS,),
    training=MEDUSA,
    paper="Cai et al. 2024",
    reconstructed="coupled sampling; the weights of heads in training",
)
