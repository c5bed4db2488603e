"""HASS: EAGLE-2's head, trained on its own states and on the target's likeliest tokens.

Zhang et al. 2024, "Learning harmonized representations for speculative sampling". Head, tree and
verification are those of `eagle-2`; what differs is the training (`mmspec.training.self_fed.HASS`):
three passes over an example, the later ones on the head's own outputs, each with EAGLE's loss and a
cross entropy over the 10 tokens that the target finds likeliest. Exact. Reconstructed: verified
with coupled noise, as in `eagle-2`.
"""

from dataclasses import replace

from mmspec.recipes.eagle_2 import RECIPE as EAGLE_2
from mmspec.training.self_fed import HASS

RECIPE = replace(
    EAGLE_2,
    optimisation="regression on the target's states from its own; likeliest tokens",
    training=HASS,
    paper="Zhang et al. 2024",
)
