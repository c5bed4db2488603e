"""Neighbourhood threshold: accepted or not, with a known distance."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.testing import assert_close

from mmspec.codes.codebook import Codebook
from mmspec.verifiers.distances import measure, over_accepted, total_variation
from mmspec.verifiers.neighbourhood_threshold import NeighbourhoodThreshold
from tests.verifiers.random_distributions import distributions, near, vector

# Codes 0, 1, 2.5 and 10
LINE = Codebook.from_offset(torch.tensor([[0.0], [1.0], [2.5], [10.0]])).neighbours(3)
P, Q = vector(0.10, 0.10, 0.55, 0.25), vector(0.05, 0.70, 0.10, 0.15)


def test_a_threshold_is_met_or_not() -> None:
    rule = NeighbourhoodThreshold(LINE, 2, tau=0.6)
    accept = measure(rule, P, Q).accept  # neighbours of 0: 1 2; of 1: 0 2; of 2: 1 0; of 3: 2 1
    assert accept.tolist() == [1, 1, 1, 1]
    tight = measure(replace(rule, k=1), P, Q)  # of 0: 1; of 1: 0; of 2: 1; of 3: 2
    assert tight.accept.tolist() == [0, 0, 1, 1]
    kept = Q * tight.accept
    assert_close(tight.output, kept + (1 - kept.sum()) * P)
    assert_close(tight.over_accepted, over_accepted(P, Q, tight.accept))


def test_a_threshold_that_is_reached_is_met() -> None:
    even = vector(0.25, 0.25, 0.25, 0.25)
    assert measure(NeighbourhoodThreshold(LINE, 1, tau=0.5), even, Q).accept.tolist() == [1] * 4
    assert measure(NeighbourhoodThreshold(LINE, 1, tau=0.51), even, Q).accept.tolist() == [0] * 4


def test_a_threshold_of_nothing_emits_the_draft() -> None:
    p, q = distributions(5, 7)
    step = measure(NeighbourhoodThreshold(near(7, 3), 3, tau=0), p, q)
    assert_close(step.output, q)
    assert_close(step.distance, total_variation(p, q))
