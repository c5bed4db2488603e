"""EAGLE: one layer on the target's hidden states drafts a static tree.

Li et al. 2024, "EAGLE: speculative sampling requires rethinking feature uncertainty". The drafter
is a `mmspec.models.heads.feature_head.FeatureHead`, trained for this target by
`mmspec.training.heads.EAGLE`: it continues the target's last hidden states and uses the target's
embedding table and output head. Siblings are drawn without replacement and verified by recursive
rejection, on the published tree of 25 nodes. Exact in distribution. Under guidance the head reads
both branches, and its logits are guided as the target's.
"""

from mmspec.draft import Kind
from mmspec.drafters.neural.feature_head import with_head
from mmspec.drafters.shapes import StaticTree
from mmspec.training.heads import EAGLE
from mmspec.trees import Tree
from mmspec.verifiers.recursive import Recursive

TREE = Tree.from_digits(
    "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
)
RECIPE = with_head(
    StaticTree(TREE, kinds=(Kind.WOR,)), Recursive(), paper="Li et al. 2024", training=EAGLE
)
