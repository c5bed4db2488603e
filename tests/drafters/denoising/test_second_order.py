"""Samplers whose step depends on the last two predictions: exact with every window drafter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mmspec.distributions.kernels import GaussianKernel
from mmspec.draft import Kind
from mmspec.drafters.denoising.extrapolated import Extrapolated
from mmspec.drafters.denoising.frozen import Frozen, Prefetch
from mmspec.drafters.denoising.picard import Picard
from mmspec.drafters.denoising.small_denoiser import IndependentDenoiser
from mmspec.drafters.denoising.window import Window
from mmspec.verifiers.gaussian_block import GaussianBlock
from mmspec.verifiers.reflection import Reflection
from mmspec.verifiers.sequence import Sequence
from tests.chains import vp_grid
from tests.covering import limited
from tests.drafters.denoising.toy_chains import Run, Steep, plain, run, surprise

KERNEL = replace(
    GaussianKernel.ancestral(*vp_grid(12)), extrapolation=0.4 * (torch.arange(12).double() > 0)
)
STEEP = Steep(KERNEL)
FOUR = Window.constant(4)


def by_hand(done: Run) -> torch.Tensor:  # (B, N + 1, d)
    """The sampler without a loop, on the noise of the run."""
    rows = torch.arange(len(done.states))
    states, before = [done.states[:, 0]], torch.zeros_like(done.states[:, 0])
    for step in range(KERNEL.num_steps):
        at = torch.full_like(rows, step)
        seen = STEEP.predict(states[-1], at, rows).clean
        noise = done.context.noise.shared_keys(at[:, None] + 1).normal(2)[:, 0]
        mean = KERNEL.mean(states[-1], KERNEL.extrapolate(seen, before, at), at)
        states.append(mean + KERNEL.std_at(at, mean) * noise)
        before = seen
    return torch.stack(states, 1)


def test_a_state_at_a_time_is_the_sampler() -> None:
    done = plain(STEEP, batch=3, max_rows=1)
    assert torch.equal(done.states, by_hand(done))
    first_order = plain(Steep(replace(KERNEL, extrapolation=None)), batch=3, max_rows=1)
    assert not torch.allclose(done.states, first_order.states, atol=0.1)
    fixed = run(Frozen(Window.constant(1)), STEEP, batch=3, max_rows=1)
    assert torch.equal(fixed.states, done.states)


@pytest.mark.parametrize(
    ("drafter", "verifier"),
    limited(
        [
            (Frozen(FOUR), Reflection()),
            (Frozen(FOUR, root=Prefetch()), Reflection()),
            (Picard(FOUR), Reflection()),
            (Extrapolated(FOUR), Reflection()),
            (IndependentDenoiser(FOUR, denoiser=STEEP), Reflection()),
            (Frozen(Window.tree((3, 2))), Sequence()),
            (Frozen(FOUR, kind=Kind.IID), GaussianBlock()),
        ],
        4,
    ),
    ids=["frozen", "prefetch", "carried", "extrapolated", "independent", "tree", "block"],
)
def test_increments_are_those_of_the_sampler(drafter: Any, verifier: Any) -> None:
    done = run(drafter, STEEP, verifier, batch=600)
    assert sum(sum(kept.accepted) for kept in done.rounds) > 0
    assert surprise(done) < 4.5
    first_order = replace(done.target, denoiser=Steep(replace(KERNEL, extrapolation=None)))
    assert surprise(replace(done, target=first_order)) > 4.5  # what it would miss is seen
