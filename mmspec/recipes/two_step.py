"""Two-step: of two drafts per node one is chosen by importance, then verified as one draft.

Khisti et al. 2024. The choice brings the chosen draft near to the target, so that its test accepts
about the optimum for two independent drafts (`mmspec bench rules` shows both). Exact.
Reconstructed: the weights of the choice, by a fixed point in place of a linear program.
"""

from mmspec.drafters.neural.feature_head import with_draft_model
from mmspec.drafters.shapes import StaticTree
from mmspec.trees import Tree
from mmspec.verifiers.two_step import TwoStep

RECIPE = with_draft_model(
    execution=StaticTree(Tree.branching([2, 2, 2])),
    verifier=TwoStep(),
    paper="Khisti et al. 2024",
    reconstructed="the weights of the choice",
)
