"""HeiSD: stored trajectories draft while a robot is fast, a feature head while it is slow.

Zheng et al. 2026 (arXiv 2603.17573). The metric F of the last `window` positions, radius and path
length weighted by `weight`, selects the drafter at threshold `cut`; the window is 15 as in the
paper, and a third of the stored episodes where these are shorter than 45 steps. Stored drafts are
kept by whole groups of components within `bias` bins each and `total` together (`aggregate`
"abs_sum", or "signed_sum" probably the paper's choice), grippers exactly; those of the head token
by token within `radius`. If the nearest stored moment has a similarity of at least `theta` and a
distance of at most `delta`, its action is accepted without a target call, at most `most_skips`
times in a row; both default to those in `constants`, a folder of `mmspec train constants`, and
without it to quantiles of the store; theta adapts to the outcome of tasks.
`store` is a folder of trajectories, default: that of the drafter. Lossy; bias=0, radius=0 and
theta=2 are exact. Reconstructed: the rule of skipping, features (the policy's own last state), the
number of neighbours, cut, theta, delta, the third; after a rejected stored draft the head drafts.
"""

from mmspec.codes.action_constants import ActionConstants
from mmspec.draft import Drafter, Gate, Kind, Verifier
from mmspec.drafters.actions.kinematics import KinematicMetric
from mmspec.drafters.actions.retrieval import Retrieval, store_of
from mmspec.drafters.actions.routed import RoutedDrafter
from mmspec.drafters.neural.feature_head import feature_head, with_head
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.recipe import Deferred, Kit
from mmspec.verifiers.action_tolerance import KINDS, ActionTolerance, FixedRadius
from mmspec.verifiers.by_source import BySource
from mmspec.verifiers.group_tolerance import GroupTolerance
from mmspec.verifiers.similarity_gate import SimilarityGate


def head_and_store(kit: Kit) -> Drafter:
    """A head on the target's own states, or stored trajectories, by how the robot moves."""
    head, store, options = feature_head(kit), store_of(kit), kit.options
    assert isinstance(head, Autoregressive)
    stored = Retrieval(kit.space, store, options["neighbours"], whole=True)
    metric = KinematicMetric.from_store(kit.space, store, options["window"], options["weight"])
    return RoutedDrafter(head, stored, metric, options["cut"])


def tolerances(kit: Kit) -> Verifier:
    """Groups of what was stored, tokens of what was grown."""
    space, options = kit.space, kit.options
    groups = GroupTolerance(space, options["bias"], options["total"], options["aggregate"])
    return BySource(
        groups, ActionTolerance(space, FixedRadius.from_options(space, options["radius"]))
    )


def similar(kit: Kit) -> Gate:
    """Moments that are alike enough."""
    options = kit.options
    fitted = kit.load_option("constants", ActionConstants) or ActionConstants()
    theta, delta = (
        getattr(fitted, name) if options[name] is None else options[name]
        for name in ("theta", "delta")
    )
    return SimilarityGate.from_store(store_of(kit), theta, delta, options["most_skips"])


RECIPE = with_head(
    DynamicTree(depth=5, beam=8, nodes=49, kinds=(Kind.DET,)),
    Deferred(tolerances, "longest path of whole groups, or within a radius", kinds=KINDS),
    architecture=head_and_store,
    gate=Deferred(similar, "stored actions of moments that are alike are kept"),
    options={
        **{"store": None, "neighbours": 4, "window": None, "weight": 0.5, "cut": 0.5},
        **{"bias": 15.0, "total": 30.0, "aggregate": "abs_sum", "radius": 9.0},
        **{"theta": None, "delta": None, "most_skips": 4, "constants": None},
    },
    needs=("action space",),
    paper="Zheng et al. 2026",
    reconstructed="the rule of skipping, features, neighbours, cut and thresholds",
    decodes="actions",
)
