"""Images of a toy model with a closed-form distribution, for one drafter and one verifier."""

from __future__ import annotations

from mmspec.decode import Parts
from mmspec.draft import Drafter, Verifier
from mmspec.modalities.mar.tiny_models import PLAN, LinearReader, SampledImages, sample_images
from mmspec.targets.continuous.patches import BlindTarget, PatchSettings, PatchTarget
from mmspec.targets.stop import Stop

ROWS = 2000
# 16 Kolmogorov-Smirnov tests per run: a right verifier fails one of them in 10 000 seeds
ALARM = 1e-4 / 16


def generate_images(
    target: LinearReader,
    drafter: Drafter,
    verifier: Verifier,
    seed: int = 0,
    plan: PatchSettings = PLAN,
) -> SampledImages:
    """Generate ROWS images."""
    scorer = BlindTarget(target) if verifier.is_blind else PatchTarget(target)
    parts = Parts(scorer, drafter, verifier, Stop(plan.steps))
    return sample_images(target, parts, range(ROWS), seed, plan)
