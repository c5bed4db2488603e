"""OFT within a tolerance: the last action, then parallel slots, accepted within a few bins.

The slots of `oft-draft` (Kim et al. 2025) under the tolerance of `spec-vla` (Wang et al. 2025),
after the draft of `hold-last-tolerance`: the last action is verified with the prompt, and after a
rejection slots draft the rest in one pass. Of a slot the bin with most mass within the radius is
proposed, then that with most of the remaining mass; all slots together make a tree of the 24
likeliest nodes (with `length=` a chain of the first bins). Lossy; `radius=0` is exact. Options as
of spec-vla: `radius` (9) for all components, or `radii` one for each (or for each group), `metric`
"bins" or "physical", `strict` components that must be equal (default: the gripper), `keep` "draft"
or "target". Compare it with `hold-last-tolerance` of the same radius.

Neither paper combines these parts. Reconstructed: as `oft-draft`, and the combination.
"""

from mmspec.draft import Drafter, Kind
from mmspec.drafters.actions.history import HistoryDrafter, HoldLast
from mmspec.drafters.actions.two_stage import TwoStageDrafter
from mmspec.drafters.actions.windows import WindowedSlots
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.action_slots import ACTION_SLOTS, ActionSlotsDraft
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.drafters.shapes import Chain
from mmspec.drafters.trees.parallel_tree import ParallelTree
from mmspec.recipe import STATES, Deferred, Kit, Recipe
from mmspec.training.action_slots import ACTION_SLOTS_TRAINING
from mmspec.verifiers.action_tolerance import (
    KINDS,
    OPTIONS,
    build_fixed_radius,
    build_tolerance,
)

MOST = 64  # tokens of an answer, or as many as are left


def held_then_slots(kit: Kit) -> Drafter:
    """The last action, and slots that know how far a token may lie off."""
    assert isinstance(kit.drafter, ActionSlotsDraft)
    length = kit.shape.length if isinstance(kit.shape, Chain) else Fixed(MOST)
    held = HistoryDrafter(kit.space, HoldLast(), length, 1)
    slots = WindowedSlots(kit.drafter, kit.space, build_fixed_radius(kit).bins)
    return TwoStageDrafter(held, Autoregressive(slots, kit.shape, Kind.DET))


RECIPE = Recipe(
    architecture=held_then_slots,
    execution=ParallelTree(nodes=24, depth=MOST),
    verifier=Deferred(build_tolerance, "longest path within a radius of bins", kinds=KINDS),
    optimisation="cross entropy of every slot",
    sees=STATES,
    draft_model=(ACTION_SLOTS,),
    options=OPTIONS,
    training=ACTION_SLOTS_TRAINING,
    needs=("action space",),
    paper="Kim et al. 2025; Wang et al. 2025",
    reconstructed="slots of a small head on a frozen policy; the last action before them",
    decodes="actions",
)
