"""Tolerances accept what their inequality allows, and the next state is the target's.

Tolerance 0 equals sequential sampling in test_gaussian_chains.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mmspec.distributions.gaussian import Gaussian
from mmspec.distributions.noise import KeyedNoise
from mmspec.draft import Draft, Kind, Scores, Verifier
from mmspec.trees import Tree
from mmspec.verifiers.tolerance_window import ToleranceWindow

NOISE = KeyedNoise(torch.tensor([5]))


def window(missed: list[float], std: float = 0.0) -> tuple[Draft, Scores]:
    """States 1, 2, 3 .. in two entries; the target would go to each plus what it was `missed` by.

    Steps are 1 long in both entries, their noise scale is 0.5.
    """
    n = len(missed)
    states = torch.arange(n + 1.0)[None, :, None].expand(1, n + 1, 2)
    position = torch.arange(n + 1)[None] + 1
    noise = std * NOISE.shared_keys(position).normal(2)
    mean = states + 1 - noise
    mean[:, :-1] += torch.tensor(missed)[:, None]
    features = {"state": states, "scale": torch.full((1, n + 1, 1), 0.5)}
    scores = Scores(Gaussian(mean, torch.tensor(std), 1), position, features)
    return Draft.from_tree(Tree.chain(n), states[:, 1:], Kind.RACE), scores


def accepted_length(verifier: Verifier, missed: list[float], std: float = 0.0) -> int:
    draft, scores = window(missed, std)
    verdict = verifier.verify(draft, scores, NOISE)
    length = int(verdict.length)
    plain: Tensor = scores.distribution.sample(NOISE.shared_keys(scores.position))
    assert_close(verdict.next, plain[:, length], rtol=0, atol=0)
    return length


def test_a_sweep_adds_up_what_was_missed() -> None:
    """|sum|^2 / d <= (0.4 * 0.5)^2, that is |sum| <= 0.2 in both entries."""
    rule = ToleranceWindow(0.4)
    assert accepted_length(rule, [0.09, 0.09, 0.09]) == 2
    assert accepted_length(rule, [0.15, -0.15, 0.15]) == 3
    assert accepted_length(rule, [0.21, -0.21]) == 0


def test_a_state_is_judged_by_the_noise_of_the_step_that_leaves_it() -> None:
    draft, scores = window([0.15, 0.0, 0.0])
    for scale, length in (
        ([0.0, 0.5, 0.5, 0.5], 3),
        ([0.5, 0.5, 0.5, 0.0], 2),
        ([9.0, 0, 1, 1], 0),
    ):
        features = {**scores.features, "scale": torch.tensor(scale)[None, :, None]}
        verdict = ToleranceWindow(0.4).verify(draft, replace(scores, features=features), NOISE)
        assert verdict.length.tolist() == [length]


def test_noise_of_the_position_cancels_and_a_wider_tolerance_keeps_more() -> None:
    missed = [0.0, 0.01, 0.05, 0.2, 0.8, 3.0]
    tolerances = (0.1, 0.3, 1.0, 100.0)
    wide = [
        accepted_length(ToleranceWindow(tolerance), missed, std=1e-3) for tolerance in tolerances
    ]
    assert wide == sorted(wide)
    assert wide[-1] == 6


def test_no_tolerance_keeps_what_is_equal() -> None:
    assert ToleranceWindow(0.0).lossless
    assert not ToleranceWindow(0.1).lossless
    assert accepted_length(ToleranceWindow(0.0), [0.0, 0.0, 1e-3, 0.0]) == 2
    with pytest.raises(ValueError, match="below 0"):
        ToleranceWindow(-0.1)
    with pytest.raises(ValueError, match="below 0"):
        ToleranceWindow(float("nan"))


def test_padded_states_and_trees_are_not_kept() -> None:
    draft, scores = window([0.0, 0.0])
    mask = torch.tensor([[True, False]])
    verdict = ToleranceWindow().verify(replace(draft, mask=mask, padded=True), scores, NOISE)
    assert verdict.length.tolist() == [1]
    tree = Draft.from_tree(Tree.branching([2]), draft.tokens, Kind.RACE)
    with pytest.raises(ValueError, match="verifies chains only"):
        ToleranceWindow().verify(tree, scores, NOISE)
