"""OFT as a drafter: a whole action is drafted in one pass and verified in one.

Kim et al. 2025, "Fine-tuning vision-language-action models: optimizing speed and success", decodes
an action in parallel, in slots that attend to each other. Here this action is a draft, which the
policy verifies in one forward; slots after a rejection are predicted again. Exact: with greedy
decoding the output is the target's own.

Reconstructed: the paper fine-tunes the whole policy for its slots. Here they are a small head on a
frozen policy's states (`mmspec.models.heads.action_slots`), trained by cross entropy on its
actions, and sampled tokens are coupled.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.action_slots import ACTION_SLOTS, action_slots
from mmspec.drafters.shapes import Chain
from mmspec.recipe import STATES, Recipe
from mmspec.training.action_slots import ACTION_SLOTS_TRAINING
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=action_slots,
    execution=Chain(Fixed(64)),  # or as many as there are slots
    verifier=Coupled(),
    optimisation="cross entropy of every slot",
    sees=STATES,
    draft_model=(ACTION_SLOTS,),
    training=ACTION_SLOTS_TRAINING,
    needs=("action space",),
    paper="Kim et al. 2025",
    reconstructed="slots of a small head on a frozen policy; coupled sampling",
)
