"""Autospeculative tree: several drafted states per step, tried one after the other.

Bullo et al. 2026 (D-GRS): siblings are independent draws around one frozen prediction, coupled with
the target by recursive rejection along the line between the two means. Exact, as the chain is
(recipe "asd"); more siblings are accepted more often, and each costs a row of the network.
"""

from mmspec.drafters.denoising.frozen import frozen_with_one_deviation, with_old_predictions
from mmspec.drafters.denoising.window import Window
from mmspec.verifiers.sequence import Sequence

RECIPE = with_old_predictions(
    frozen_with_one_deviation,
    Sequence(),
    Window.tree((2, 2, 2)),
    options={"root": "prefetch"},
    paper="Bullo et al. 2026",
    reconstructed="widths of the tree",
)
