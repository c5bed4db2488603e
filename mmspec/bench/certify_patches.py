"""Is a recipe for continuous tokens as lossless as it says? Gaussian pictures tell.

A recipe draws pictures whose law is known in closed form, with draft models that are wrong in their
means, in their spreads, or in both. Seeds tell where the theory gives equality: a draft model that
is the target itself gives the plain picture.
"""

from __future__ import annotations

import torch

from mmspec.bench.certificate import ALPHA, Certificate, Check, outcome, verdict
from mmspec.bench.patches import (
    PLAN,
    Drawn,
    LinearHead,
    LinearReader,
    draw,
    innovations,
    p_values,
    uniform_gap,
)
from mmspec.bench.progress import Progress, silent
from mmspec.decode import Parts
from mmspec.drafters.plain import Silent
from mmspec.modalities.mar.plug import bind
from mmspec.recipe import Recipe
from mmspec.targets.patches import PatchTarget
from mmspec.targets.stop import Stop
from mmspec.verifiers.path_ratio import PathRatio

BATCH = 1000
_STD = (0.5, 0.4, 0.3)
TARGET = LinearReader(LinearHead.of(_STD, slope=0.3))
DRAFTS = {
    "other means": LinearReader(TARGET.head, bias=0.5, weight=0.2),
    "other spreads": LinearReader(LinearHead.of(_STD, slope=0.3, spread=(1.3, 0.8, 1.2))),
    "both": LinearReader(LinearHead.of(_STD, slope=0.0, spread=(0.8, 1.1, 0.9)), bias=0.3),
}


def certify_patches(
    plan: Recipe, *, seeds: int = 50, samples: int = 6000, progress: Progress = silent
) -> Certificate:
    """Test a recipe of continuous tokens; a lossy one is measured."""
    checks, gaps = [], []
    for name in DRAFTS:
        found, gap = _frequencies(plan, name, samples, ALPHA / len(DRAFTS), progress)
        checks.append(found)
        gaps.append(gap)
    checks.append(_twin(plan, seeds))
    words = "largest gap of the distribution function of what a cell adds, chance included"
    return Certificate(
        plan.name or "custom",
        plan.exact,
        verdict(plan, checks),
        checks,
        max(gaps),
        distance_of=words,
    )


def plain_parts() -> Parts:
    """Plain sampling of the toy, by the loop without a drafter."""
    return Parts(PatchTarget(TARGET), Silent(), PathRatio(), Stop(PLAN.steps))


def _frequencies(
    plan: Recipe, name: str, samples: int, alpha: float, progress: Progress
) -> tuple[Check, float]:
    """What cells add, tested on one draft model.

    An alarm is checked once, with four times as many new samples, and only then counts.
    """
    passed, least, gap, taken = True, 1.0, 0.0, 0.0
    for attempt in range(2):
        many = samples * 4**attempt
        parts = bind(plan, TARGET, DRAFTS[name]).parts(PLAN)
        found, rounds = [], 0
        for first in range(0, many, BATCH):
            rows = range(first, min(first + BATCH, many))
            drawn = draw(TARGET, parts, rows, seed=attempt)
            found.append(innovations(TARGET, drawn))
            rounds += sum(bool(new) for kept in drawn.rounds for new in kept.tokens)
            progress(f"sample, {name}", rows.stop, many)
        added = torch.cat(found)
        values = p_values(added)
        least, alpha_each = min(values), alpha / len(values)
        gap = max(uniform_gap(torch.special.ndtr(column)) for column in added.unbind(1))
        taken = many * PLAN.steps / rounds
        passed = least >= alpha_each
        if passed:
            break
    detail = (
        f"least p {least:.2g} of {len(values)} KS tests ({many} samples, alpha {alpha_each:.1e} "
        f"each); {taken:.1f} times fewer calls than plain sampling; largest gap {gap:.3f}"
    )
    return Check(f"frequencies, {name}", outcome(plan, passed), detail), gap


def _twin(plan: Recipe, seeds: int) -> Check:
    """A draft model that is the target drafts what plain sampling does, and all is accepted."""
    found: Drawn = draw(TARGET, bind(plan, TARGET, TARGET).parts(PLAN), range(seeds))
    wanted = draw(TARGET, plain_parts(), range(seeds))
    same = (found.latents == wanted.latents).all(-1)
    detail = f"{int(same.sum())} of {seeds} seeds give the plain picture bit for bit"
    return Check("draft = target", outcome(plan, bool(same.all())), detail)
