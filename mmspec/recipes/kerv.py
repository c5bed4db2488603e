"""KERV: Spec-VLA with a radius by motion; a Kalman filter completes rejected actions.

Zheng et al. 2026 (arXiv 2603.01581). Drafts and trees as of spec-vla; the radius lies between
`least` and `most` bins and shrinks as accepted tokens deviate from the robot's motion (`reference`,
`beta`). After a rejected token and the target's correction, the rest of the action is a filter's
forecast from the last `window` actions, accepted without a target call; then not again for
`lockout` steps. `motion` is "constant_velocity" or "random_walk"; grippers are constant, and
strict. `constants` is a folder of `mmspec train constants`, with the reference and the filter of a
robot's task; the defaults are 1 and a constant velocity. Lossy; with lockout=inf and least=most it
is spec-vla of that radius. Reconstructed: the formula of the radius with beta and reference, the
filter's constants, and that the target's correction is kept.
"""

from dataclasses import replace

from mmspec.codes.action_constants import ActionConstants
from mmspec.draft import Drafter, Gate, Kind, Verifier
from mmspec.drafters.actions.completion import CompletingDrafter, OnRefusal
from mmspec.drafters.actions.history import ActionForecast
from mmspec.drafters.actions.kalman import MODELS, ActionFilter, forecast_of
from mmspec.drafters.neural.feature_head import feature_head, with_head
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.recipe import Deferred, Kit
from mmspec.verifiers.action_tolerance import KINDS, ActionTolerance, resolve_space
from mmspec.verifiers.completion_gate import CompletionGate
from mmspec.verifiers.kinematic_radius import KinematicRadius


def completed_head(kit: Kit) -> Drafter:
    """A head on the target's own states, and a Kalman filter behind its mistakes."""
    if kit.options["lockout"] == float("inf"):  # never completed, so nothing is forecast
        return feature_head(kit)
    inner, window = feature_head(kit), kit.options["window"]
    is_given = kit.options["motion"] is not None
    forecast: ActionForecast = forecast_of(kit) if is_given else fitted_filter(kit)
    return CompletingDrafter(inner, kit.space, forecast, OnRefusal(), window)


def fitted_filter(kit: Kit) -> ActionFilter:
    """The filter of the option `constants`, or the default one."""
    found = load_constants(kit)
    return replace(MODELS[found.motion], process=found.process, measurement=found.measurement)


def load_constants(kit: Kit) -> ActionConstants:
    """The option `constants`, or the defaults. Raises ValueError for anything else."""
    found: ActionConstants | None = kit.load_option("constants", ActionConstants)
    return ActionConstants() if found is None else found


def kinematic(kit: Kit) -> Verifier:
    """A radius that follows the motion."""
    space, options = resolve_space(kit), kit.options
    given = options["reference"]
    reference = load_constants(kit).reference if given is None else given
    bounds = (options["least"], options["most"], reference, options["beta"])
    return ActionTolerance(space, KinematicRadius(space, *bounds, options["window"]))


def completion(kit: Kit) -> Gate:
    """What keeps the filter's forecasts."""
    return CompletionGate(kit.options["lockout"])


RECIPE = with_head(
    DynamicTree(depth=5, beam=8, nodes=49, kinds=(Kind.DET,)),
    Deferred(kinematic, "longest path within a radius that follows the motion", kinds=KINDS),
    architecture=completed_head,
    gate=Deferred(completion, "a Kalman filter completes refused actions"),
    options={
        **{"least": 5.0, "most": 15.0, "reference": None, "beta": 0.3, "strict": None},
        **{"constants": None, "motion": None, "window": 10, "lockout": 4.0},
    },
    needs=("action space",),
    paper="Zheng et al. 2026",
    reconstructed="the formula of the radius, constants of the filter, and that corrections stay",
    decodes="actions",
)
