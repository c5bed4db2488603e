"""What a recipe can save in few steps, and steps that a distilled model does not need: one warning.

A call of few steps is mostly one of a distilled model (Turbo, Lightning, LCM, schnell), where every
recipe comes to its warm-up, and an exact one to its first and last step. Both are known before the
pipeline runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

from mmspec.modalities.diffusion.network import Network

MOST = 0.5  # of the steps may be computed in full without a warning
FEW = 8  # steps of a distilled model
DISTILLED = ("LCMScheduler", "TCDScheduler")


def count_steps(given: Mapping[str, Any]) -> int | None:
    """The steps of a pipeline's call; None where its arguments do not say."""
    listed = [given.get(name) for name in ("timesteps", "sigmas")]
    own = next((one for one in listed if isinstance(one, Sized)), None)
    steps = given.get("num_inference_steps") if own is None else len(own)
    strength = given.get("strength")
    if steps is None or given.get("image") is None or not isinstance(strength, float):
        return steps
    return max(int(steps * strength), 1)


def is_distilled(pipe: Any) -> bool:
    """Whether the configuration shows a model distilled to few steps.

    A sampler of consistency models, or a network that reads the guidance scale with the time.
    Models distilled without such a mark (Turbo, Lightning, schnell) are not recognised.
    """
    config = getattr(Network(pipe).module, "config", {})
    return (
        type(pipe.scheduler).__name__ in DISTILLED or config.get("time_cond_proj_dim") is not None
    )


def describe_few_steps(pipe: Any, name: str, steps: int, fewest: int) -> str | None:
    """The warning of a call of `steps`, of which at least `fewest` are computed; None = fine."""
    if steps > FEW and is_distilled(pipe):
        return (
            f"this model is distilled to few steps, and {steps} are asked for; sample 4 to {FEW} "
            "with the pipeline itself, which needs no recipe"
        )
    if fewest <= MOST * steps:
        return None
    if fewest == steps:
        return (
            f"{name!r} skips none of {steps} steps, so this is the pipeline itself; sample more "
            f"steps, or change its options (warm-up, interval, coefficients: see `mmspec show "
            f"{name}`)"
        )
    return (
        f"{name!r} calls the network at least {fewest} times in {steps} steps, so it can save "
        "little here; call the pipeline itself, or sample more steps"
    )
