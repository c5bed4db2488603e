"""KERV as released: a radius that decays with time; a filter completes every fourth action.

The code of Zheng et al. 2026 (lusunn111/KERV), which simplifies the paper. Drafts and trees as of
spec-vla. The radius falls from `most` to `least` bins by a `schedule`, "cubic" or "exponential",
within `horizon` steps, independently of the robot. At every step whose number is a multiple of
`period` the action is completed after its first verified draft by a random walk over all actions of
the episode, which nearly repeats the last one. Lossy. Unlike that code: grippers are strict unless
`strict=[]`, components are identified by position (its completion is shifted by one), the filter
runs on values, not on ids, and its branches in the tree are left out.
"""

from mmspec.draft import Drafter, Gate, Kind, Verifier
from mmspec.drafters.actions.completion import CompletingDrafter, EveryFew
from mmspec.drafters.actions.kalman import RandomWalk
from mmspec.drafters.neural.feature_head import feature_head, with_head
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.errors import choose_option
from mmspec.recipe import Deferred, Kit
from mmspec.verifiers.action_tolerance import KINDS, ActionTolerance, resolve_space
from mmspec.verifiers.completion_gate import CompletionGate
from mmspec.verifiers.scheduled_radius import SCHEDULES, ScheduledRadius


def periodically_completed_head(kit: Kit) -> Drafter:
    """A head on the target's own states, and a random walk that ends every few actions."""
    occasion = EveryFew(kit.options["period"])
    return CompletingDrafter(feature_head(kit), kit.space, RandomWalk(), occasion, None)


def build_schedule(kit: Kit) -> Verifier:
    """A radius that falls with time."""
    options = kit.options
    schedule = choose_option("schedule", options["schedule"], SCHEDULES)
    bounds = (options["most"], options["least"], options["horizon"])
    return ActionTolerance(
        resolve_space(kit), ScheduledRadius(resolve_space(kit), schedule, *bounds)
    )


def completion(kit: Kit) -> Gate:
    """What keeps the filter's forecasts; the period locks it out enough."""
    return CompletionGate(0)


RECIPE = with_head(
    DynamicTree(depth=5, beam=8, nodes=49, kinds=(Kind.DET,)),
    Deferred(build_schedule, "longest path within a radius that falls with time", kinds=KINDS),
    architecture=periodically_completed_head,
    gate=Deferred(completion, "a random walk ends every few actions"),
    options={
        **{"schedule": "cubic", "most": 15.0, "least": 3.0, "horizon": 220, "period": 4},
        "strict": None,
    },
    needs=("action space",),
    paper="Zheng et al. 2026",
    reconstructed="the branches of the filter are left out",
    decodes="actions",
)
