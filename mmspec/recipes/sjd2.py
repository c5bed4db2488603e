"""SJD2: the slots of a Jacobi window begin as noise and are denoised into tokens, pass by pass.

Teng et al. 2025 (NeurIPS 2025), "Speculative Jacobi-denoising decoding for accelerating
autoregressive text-to-image generation". The target reads noisy embeddings for the slots that are
not tokens yet and says which clean tokens belong there; a slot takes `steps` such steps along the
schedule of Karras et al. 2022. It is meant for a model that was fine-tuned to read noise, and runs
on any causal model, but without the fine-tuning noise tells it little and SJD is faster.

Exact for the distribution of the model that decodes: only slots that have become clean, and stand
before every noisy one, are verified. Against the model before its fine-tuning it is lossy, since
that is another model. steps=0 is SJD. `encoding` (steps + 1, D) is what a fine-tuned model wants
added to embeddings of each noise level, the clean one first. Reconstructed from a digest: the
distribution stored with a freshly denoised token, the ends of the schedule, the form of the
encoding.
"""

from mmspec.drafters.jacobi.carry_over import with_window
from mmspec.drafters.jacobi.denoised import denoised_window
from mmspec.verifiers.recursive import Recursive

RECIPE = with_window(
    denoised_window,
    95,
    Recursive(),
    options={"steps": 20, "encoding": None},
    optimisation="the target is fine-tuned to read noise",
    paper="Teng et al. 2025 (SJD2)",
    reconstructed="the distribution of a freshly denoised token, the schedule's ends, the encoding",
)
