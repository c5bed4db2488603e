"""Medusa: heads on the target's last state predict later tokens and fill a static tree.

Cai et al. 2024, "Medusa: simple LLM inference acceleration framework with multiple decoding heads".
The drafter is `mmspec.models.heads.medusa.MedusaHeads`, trained on a frozen target by
`mmspec.training.medusa_hydra.MEDUSA`; the heads are independent, also of the tokens between. The
tree is the published one of 63 nodes, up to 10 wide. Exact: greedy and sampled output is plain
decoding's. The paper's own rule for sampling, which is lossy, is
`verifier=Longest(Typical(epsilon=0.09, delta=0.3))`, as recipe `typical` uses for these heads.
Reconstructed: coupled noise for sampling; head i has weight 0.8^(i + 1) in training.
"""

from mmspec.drafters.neural.multi_token import MEDUSA_HEADS, SEES, multi_token_heads
from mmspec.drafters.shapes import StaticTree
from mmspec.recipe import Recipe
from mmspec.training.medusa_hydra import MEDUSA
from mmspec.trees import Tree
from mmspec.verifiers.coupled import Coupled

TREE = Tree.from_digits(
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
