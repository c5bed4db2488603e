"""The distance between the images of two samplers, and what it is by chance.

The energy distance (Székely and Rizzo 2013) of two sets of images is zero only for samples of one
distribution, and takes no trained network. Its value for one distribution is that of random splits
of all images; an alarm at level 1 % means that fewer than one split in a hundred is as far apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SPLITS = 999


@dataclass(frozen=True)
class SetDistance:
    """The energy distance of two sets, beside that of random splits of both together."""

    distance: float
    by_chance: float  # median over the splits
    alarm: float  # their 99 % quantile: the least distance that counts as a difference
    p_value: float


def compare_sets(one: np.ndarray, other: np.ndarray, seed: int = 0) -> SetDistance:
    """Compare images (N, H, W, 3) and (M, H, W, 3) of floats in [0, 1].

    The distance is of root mean squared differences per pixel. Raises ValueError for fewer than two
    images on a side.
    """
    if min(len(one), len(other)) < 2:
        raise ValueError(
            f"sets of {len(one)} and {len(other)} images are too small; give two or more of each"
        )
    pixels = np.concatenate([one, other]).reshape(len(one) + len(other), -1).astype(np.float64)
    squares = (pixels**2).mean(1)
    products = pixels @ pixels.T / pixels.shape[1]
    apart = np.sqrt(np.maximum(squares[:, None] + squares[None] - 2 * products, 0))
    order = np.arange(len(pixels))
    found = _energy(apart, order, len(one))
    random = np.random.default_rng(seed)
    splits = np.array([_energy(apart, random.permutation(order), len(one)) for _ in range(SPLITS)])
    p_value = (1 + int((splits >= found).sum())) / (1 + SPLITS)
    return SetDistance(
        found, float(np.median(splits)), float(np.quantile(splits, 0.99)), float(p_value)
    )


def _energy(apart: np.ndarray, order: np.ndarray, first: int) -> float:
    """Mean distance between the sets, less half of those within, without pairs of one image."""
    mine, theirs = order[:first], order[first:]
    within = sum(
        apart[np.ix_(side, side)].sum() / (len(side) * (len(side) - 1)) for side in (mine, theirs)
    )
    return float(2 * apart[np.ix_(mine, theirs)].mean() - within)
