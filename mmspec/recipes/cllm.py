"""CLLM: Jacobi iteration over a window of tokens, for a target trained to end it in few steps.

Kou et al. 2024; Santilli et al. 2023. One forward reads all drafted tokens; those before the first
that differs from the target's choice are accepted, and the others are replaced by its choices.
Exact to the target that is given, greedily and, with the noise of each position kept, sampled. Of
any target it is Jacobi decoding, with about one token a forward; `mmspec train cllm` writes one
with more, which is another model than the one before.
"""

from mmspec.drafters.jacobi.window import noise_sharing_window, with_window
from mmspec.verifiers.coupled import Coupled

RECIPE = with_window(
    noise_sharing_window,
    15,
    Coupled(),
    optimisation="consistency training of the target",
    paper="Kou et al. 2024",
    reconstructed="the window slides over the text, and new slots are random tokens",
)
