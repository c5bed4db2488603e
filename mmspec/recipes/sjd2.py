"""SJD2: the slots of a Jacobi window begin as noise and are denoised over several passes.

Teng et al. 2025 (NeurIPS 2025), "Speculative Jacobi-denoising decoding for accelerating
autoregressive text-to-image generation". The target reads noisy embeddings in slots without tokens
and predicts the clean tokens; a slot takes `steps` such steps along the schedule of Karras et al.
2022. It is meant for a model that was fine-tuned to read noise, and runs on any causal model, but
SJD is faster without the fine-tuning.

Exact for the distribution of the model that decodes: only clean slots before every noisy one are
verified. It is lossy relative to the model before its fine-tuning. steps=0 is SJD. `encoding`
(steps + 1, D) is added to the embeddings per noise level, the clean one first. Reconstructed from a
digest: the distribution stored with a freshly denoised token, the ends of the schedule, the form of
the encoding.
"""

from mmspec.drafters.jacobi.denoised_window import denoised_window
from mmspec.drafters.jacobi.window import with_window
from mmspec.verifiers.recursive import Recursive

RECIPE = with_window(
    denoised_window,
    95,
    Recursive(),
    options={"steps": 20, "encoding": None},
    optimisation="the target is fine-tuned to read noise",
    needs=("image tokens",),
    paper="Teng et al. 2025 (SJD2)",
    reconstructed="the distribution of a freshly denoised token, the schedule's ends, the encoding",
)
