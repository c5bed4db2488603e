"""Pictures of a toy with a distribution in closed form, for one drafter and one verifier."""

from __future__ import annotations

from mmspec.decode import Parts
from mmspec.draft import Drafter, Verifier
from mmspec.modalities.mar.toys import PLAN, LinearReader, SampledPictures, draw
from mmspec.targets.continuous.patches import BlindTarget, PatchSettings, PatchTarget
from mmspec.targets.stop import Stop

ROWS = 2000
# 16 Kolmogorov-Smirnov tests per run: a right verifier fails one of them in 10 000 seeds
ALARM = 1e-4 / 16


def drawn(
    target: LinearReader,
    drafter: Drafter,
    verifier: Verifier,
    seed: int = 0,
    plan: PatchSettings = PLAN,
) -> SampledPictures:
    """ROWS pictures."""
    scorer = BlindTarget(target) if verifier.blind else PatchTarget(target)
    parts = Parts(scorer, drafter, verifier, Stop(plan.steps))
    return draw(target, parts, range(ROWS), seed, plan)
