"""OFT as a drafter: a whole action is drafted in one pass, and the policy verifies it in one.

Kim et al. 2025, "Fine-tuning vision-language-action models: optimizing speed and success", decodes
an action in parallel, in slots that see each other. That answer is not the policy's own; here it is
a draft, which the policy reads at once: it keeps what it would have said itself, and slots behind a
rejection are filled anew. Exact: with greedy decoding the output is the target's own.

Reconstructed: the paper fine-tunes the whole policy for its slots. Here they are a small head on a
frozen policy's states (`mmspec.models.heads.action_slots`), trained by cross entropy against its
answers, and sampled tokens are coupled.
"""

from mmspec.drafters.growth import Chain
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.action_slots import ACTION_SLOTS, action_slots
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
    paper="Kim et al. 2025",
    reconstructed="slots of a small head on a frozen policy; coupled sampling",
)
