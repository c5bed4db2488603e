"""Distances between sets of images."""

from __future__ import annotations

import numpy as np
import pytest

from mmspec.modalities.diffusion.sampler_distance import compare_sets


def _images(count: int, shift: float, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    return np.clip(0.5 + shift + 0.1 * random.standard_normal((count, 4, 4, 3)), 0, 1)


@pytest.mark.exhaustive
def test_one_distribution_is_within_chance_and_another_is_not() -> None:
    """Of 40 pairs of equal sets at level 1 %, at most 3 raise an alarm but once in 1,500 runs."""
    same = [
        compare_sets(_images(16, 0, 2 * seed), _images(16, 0, 2 * seed + 1)) for seed in range(40)
    ]
    assert sum(one.distance > one.alarm for one in same) <= 3
    assert abs(np.mean([one.p_value for one in same]) - 0.5) < 0.2
    other = compare_sets(_images(16, 0, 0), _images(16, 0.08, 1))
    assert other.distance > other.alarm
    assert other.p_value <= 0.01


def test_too_few_images_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sets of 1 and 4 images are too small"):
        compare_sets(_images(1, 0, 0), _images(4, 0, 0))
