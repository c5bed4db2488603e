"""Hydra: Medusa's heads in sequence, each conditioned on the tokens drafted before it.

Ankner et al. 2024, "Hydra: sequentially-dependent draft heads for Medusa decoding". The drafter is
`mmspec.models.heads.hydra.HydraHeads`, trained on a frozen target by
`mmspec.training.medusa_hydra.HYDRA`. Exact: greedy and sampled output is plain decoding's; recipe
`typical` verifies these heads by the paper's own rule for sampling, which is lossy. Reconstructed:
the tree, which is Medusa's of 63 nodes; coupled noise for sampling.
"""

from dataclasses import replace

from mmspec.drafters.neural.hydra import HYDRA_HEADS
from mmspec.recipes.medusa import RECIPE as MEDUSA
from mmspec.training.medusa_hydra import HYDRA

RECIPE = replace(
    MEDUSA,
    draft_model=(HYDRA_HEADS,),
    training=HYDRA,
    paper="Ankner et al. 2024",
    reconstructed="the tree; coupled sampling",
)
