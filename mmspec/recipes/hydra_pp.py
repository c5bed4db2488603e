"""Hydra++: Hydra's heads after a decoder layer of their own, trained on the target's distributions.

Ankner et al. 2024, section 5. A layer in front of the heads reads the target's states of the whole
prefix; 4 heads of 4 blocks are trained on the target's distributions, not its tokens
(`mmspec.training.medusa_hydra.HYDRA_PP`). Exact: greedy and sampled output is plain decoding's.
Reconstructed: the tree, which is Medusa's of 63 nodes; coupled noise for sampling.
"""

from dataclasses import replace

from mmspec.drafters.neural.hydra import HYDRA_HEADS
from mmspec.recipes.hydra import RECIPE as HYDRA
from mmspec.training.medusa_hydra import HYDRA_PP

PARTS = {"hydra_head_arch": "prefix-mlp"}
RECIPE = replace(
    HYDRA,
    optimisation="cross entropy of every head against the target's distributions",
    draft_model=(replace(HYDRA_HEADS, description="set of Hydra++ heads", parts=PARTS),),
    training=HYDRA_PP,
)
