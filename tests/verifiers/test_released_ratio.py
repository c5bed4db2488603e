"""The released rule of CSpD: its formula, where it is exact, and where it is not."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.bench.gaussian_tests import standard_normal_p_values
from mmspec.distributions.noise import Flips, KeyedNoise, Keys
from mmspec.drafters.denoising.patches import Ahead, AlignedDrafter, Milestones
from mmspec.modalities.mar.tiny_models import LinearHead, LinearReader, innovations
from mmspec.targets.continuous.patches import BlindTarget, PatchRequest, PatchSettings
from mmspec.verifiers.path_ratio import as_path_distribution
from mmspec.verifiers.released_ratio import ReleasedRatio
from tests.covering import limited
from tests.verifiers.toy_images import ALARM, generate_images

TARGET = LinearReader(LinearHead.of((0.5, 0.4, 0.3), slope=0.3, spread=(0.9, 1.2, 1.1)))
DRAFT = LinearReader(LinearHead.of((0.5, 0.4, 0.3), spread=(1.1, 1.0, 0.8)), bias=0.4)
SINGLE = PatchSettings(steps=4)


@dataclass
class RecordingNoise:
    """Noise that records the acceptance probabilities."""

    inner: KeyedNoise
    odds: list[Tensor] = field(default_factory=list)

    def shared_keys(self, position: Tensor) -> Keys:
        return self.inner.shared_keys(position)

    def fresh_keys(self, lane: int, index: Tensor) -> Keys:
        return self.inner.fresh_keys(lane, index)

    def flip(self, probability: Tensor, lane: int) -> Tensor:
        self.odds.append(probability)
        return self.inner.flip(probability, lane)

    def prepare_flips(self, lanes: Tensor) -> Flips:
        return self.inner.prepare_flips(lanes)

    def pick(self, weights: Tensor, lane: int) -> Tensor:
        return self.inner.pick(weights, lane)

    def choose(self, survival: Tensor, level: Tensor, count: int, lane: int) -> Tensor:
        return self.inner.choose(survival, level, count, lane)

    def position_gumbel(self, lengths: tuple[int, ...], count: int, size: int) -> Tensor:
        return self.inner.position_gumbel(lengths, count, size)

    def fresh_gumbel(self, lane: int, count: int, size: int) -> Tensor:
        return self.inner.fresh_gumbel(lane, count, size)

    def fresh_uniform(self, lane: int, count: int, size: int) -> Tensor:
        return self.inner.fresh_uniform(lane, count, size)


def verify_round(rule: ReleasedRatio, target: Any, small: Any, depth: int = 2) -> tuple[Any, ...]:
    """Draft, scores, verdict and acceptance probabilities of one round of 3 images."""
    noise = KeyedNoise.from_seed(3, 3, torch.device("cpu"))
    scorer = BlindTarget(target)
    context = scorer.prefill(PatchRequest(PatchSettings(steps=3), 3, noise))
    draft = AlignedDrafter(small, Ahead(depth)).propose(context, None)
    heard, scores = RecordingNoise(noise), scorer.score(context, draft)
    verdict = rule.verify(draft, scores, heard)
    return draft, scores, verdict, heard.odds[0]


def by_hand(reader: LinearReader, noise: list[float], condition: float) -> Any:
    """Mean and std of the last step of a path, the sum of log std before, and its end."""
    head = reader.head
    assert isinstance(head, LinearHead)
    x, total = noise[0], 0.0
    for index in range(3):
        a, b = float(head.kernel.state[index]), float(head.kernel.clean[index])
        std = float(head.kernel.std[index]) * head.spread[index]
        mean = a * x + b * (condition + head.slope * x)
        x = mean + std * noise[index + 1]
        total += math.log(std) if index < 2 else 0.0
    return mean, std, total, x


@pytest.mark.parametrize("factor", ["code", "path", "none"])
@pytest.mark.parametrize("tau", [1.0, 42.0])
def test_the_odds_are_those_of_the_formula(factor: str, tau: float) -> None:
    draft, _, _, odds = verify_round(ReleasedRatio(tau, factor), TARGET, DRAFT, depth=1)
    sign = {"code": 1, "path": -1, "none": 0}[factor]
    for row in range(3):
        noise = draft.extras.noise[row, 0, 0, :, 0].tolist()
        mu_p, sd_p, ell_p, _ = by_hand(TARGET, noise, 0.0)
        mu_q, sd_q, ell_q, x = by_hand(DRAFT, noise, 0.4)
        assert draft.tokens[row, 0, 0, -1, 0].item() == pytest.approx(x, abs=1e-5)
        far = ((x - mu_p) / sd_p / tau) ** 2 - ((x - mu_q) / sd_q / tau) ** 2
        wanted = math.exp(sign * (ell_p - ell_q)) * sd_q / sd_p * math.exp(-far / 2)
        assert odds[row, 0, 0].item() == pytest.approx(min(1.0, wanted), rel=1e-4)


def test_all_steps_stay_and_cells_are_redrawn_in_place() -> None:
    draft, scores, verdict, odds = verify_round(ReleasedRatio(1.0, "none"), TARGET, DRAFT, depth=3)
    assert verdict.length.tolist() == [3, 3, 3]
    assert verdict.next is None
    changed = (verdict.replacements != draft.tokens).flatten(3).any(-1)
    assert changed.any()
    assert (odds[changed] < 1).all()
    assert torch.equal(verdict.replacements[..., :-1, :], draft.tokens[..., :-1, :])
    p = as_path_distribution(scores.distribution)  # the target reads nothing of the draft
    assert (p.condition[:, :3][p.real[:, :3]] == 0).all()


def test_a_single_noisy_step_is_speculative_sampling() -> None:
    """tau = 1, no factor, a head of one step, one cell at a time: exact (alarm 1e-4)."""
    target = LinearReader(LinearHead.of((0.5,)))
    drafter = AlignedDrafter(
        LinearReader(LinearHead.of((0.5,), spread=(1.3,)), bias=0.6), Milestones(1, 0)
    )
    rule = ReleasedRatio(1.0, "none", tries=10_000)
    found = generate_images(target, drafter, rule, plan=SINGLE)
    assert len(found.rounds) == 4
    assert min(standard_normal_p_values(innovations(target, found, SINGLE))) > ALARM


@pytest.mark.parametrize(
    "rule", limited([ReleasedRatio(), ReleasedRatio(1.0), ReleasedRatio(1.0, "path")], 2), ids=repr
)
def test_as_released_it_is_another_distribution(rule: ReleasedRatio) -> None:
    found = generate_images(TARGET, AlignedDrafter(DRAFT, Milestones(2, 0)), rule)
    assert min(standard_normal_p_values(innovations(TARGET, found))) < ALARM


@pytest.mark.parametrize("fallback", [False, True])
def test_what_is_left_after_the_last_try(fallback: bool) -> None:
    """A draft with much wider early steps, whose effect vanishes in the last: F alone is tiny.

    So nothing is accepted, and no residual sample passes.
    """
    std = (0.5, 0.4, 0.3)
    target = LinearReader(LinearHead.of(std, slope=-1.0))
    wide = LinearReader(LinearHead.of(std, slope=-1.0, spread=(900.0, 900.0, 1.0)))
    rule = ReleasedRatio(42.0, tries=3, fallback=fallback)
    draft, scores, verdict, odds = verify_round(rule, target, wide, depth=1)
    assert odds[..., 0].max() < 1e-3
    kept = verdict.replacements[:, 0, 0, -1, 0]
    own = as_path_distribution(scores.distribution)[:, :-1].walk(draft.extras.noise)[0][
        :, 0, 0, -1, 0
    ]
    assert torch.equal(kept, own if fallback else torch.zeros(3))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tau": 0.0}, "tau=0.0 must be positive"),
        ({"factor": "both"}, "factor='both' is none of code, path, none"),
        ({"tries": 0}, "tries=0 leaves no try"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReleasedRatio(**settings)
