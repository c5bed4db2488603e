"""FastVLM: a quarter of the target's layers drafts, followed by a network that imitates the rest.

Bajpai and Hanawal 2025, "FastVLM: self-speculative decoding for fast vision-language model
inference". The imitation network follows the exit layer and is trained on the target's outputs and
last states (`mmspec.training.kangaroo.FASTVLM`). Exact: the whole target verifies, where the paper
reports a small loss. Reconstructed: the network is Kangaroo's adapter with an MLP and a norm of its
own; the exit, 5 tokens, the threshold and the weights of the loss; the target verifies from its
first layer on; coupled noise for sampling. The threshold ends a draft where the network is unsure:
one that was hardly trained drafts 1.7 tokens a round, whatever of them is accepted.
"""

from dataclasses import replace

from mmspec.drafters.lengths.length import Confidence
from mmspec.drafters.shapes import Chain
from mmspec.recipes.kangaroo import RECIPE as KANGAROO
from mmspec.training.kangaroo import FASTVLM

RECIPE = replace(
    KANGAROO,
    execution=Chain(Confidence(threshold=0.4, max_length=5)),
    optimisation="imitation of the target's last states, distributions and tokens",
    training=FASTVLM,
    paper="Bajpai and Hanawal 2025",
    reconstructed="network, exit, length, threshold and loss; coupled sampling",
)
