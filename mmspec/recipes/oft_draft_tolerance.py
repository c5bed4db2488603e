"""OFT within a tolerance: the last action again, then parallel slots, kept within a few bins.

The slots of `oft-draft` (Kim et al. 2025) under the tolerance of `spec-vla` (Wang et al. 2025),
behind the draft of `hold-last-tolerance`: the last action rides on the prompt, which is read in any
case, and where some of it is refused, slots draft all of the rest in one pass. Of what a slot says,
the bin is proposed around which most of its distribution lies within the radius, and then that
around which most of what is left; all slots together make a tree of the 24 likeliest nodes (with
`length=` a chain of the first bins). Lossy; `radius=0` is exact. Options as of spec-vla: `radius`
(9) for all components, or `radii` one for each (or for each group), `metric` "bins" or "physical",
`strict` components that must be equal (the gripper, unless said), `keep` "draft" or "target". Put
`hold-last-tolerance` of the same radius beside it.

Neither paper joins these parts: reconstructed as said under `oft-draft`, and the rest is ours.
"""

from mmspec.draft import Drafter, Kind
from mmspec.drafters.actions.history import FromHistory, HoldLast
from mmspec.drafters.actions.opened import Opened
from mmspec.drafters.actions.windows import WindowedSlots
from mmspec.drafters.growth import Chain
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.action_slots import ACTION_SLOTS, ActionSlotsDraft
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.drafters.trees.parallel_tree import ParallelTree
from mmspec.recipe import STATES, Deferred, Kit, Recipe
from mmspec.training.action_slots import ACTION_SLOTS_TRAINING
from mmspec.verifiers.action_tolerance import (
    KINDS,
    OPTIONS,
    fixed_radius,
    within_radius,
)

MOST = 64  # tokens of an answer, or as many as are left


def held_then_slots(kit: Kit) -> Drafter:
    """The last action, and slots that know how far a token may lie off."""
    assert isinstance(kit.drafter, ActionSlotsDraft)
    length = kit.shape.length if isinstance(kit.shape, Chain) else Fixed(MOST)
    held = FromHistory(kit.space, HoldLast(), length, 1)
    slots = WindowedSlots(kit.drafter, kit.space, fixed_radius(kit).bins)
    return Opened(held, Autoregressive(slots, kit.shape, Kind.DET))


RECIPE = Recipe(
    architecture=held_then_slots,
    execution=ParallelTree(nodes=24, depth=MOST),
    verifier=Deferred(within_radius, "longest path within a radius of bins", kinds=KINDS),
    optimisation="cross entropy of every slot",
    sees=STATES,
    draft_model=(ACTION_SLOTS,),
    options=OPTIONS,
    training=ACTION_SLOTS_TRAINING,
    paper="Kim et al. 2025; Wang et al. 2025",
    reconstructed="slots of a small head on a frozen policy; the last action before them",
    decodes="actions",
)
