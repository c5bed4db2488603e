"""How far a chain may be drafted: the last state is always the target's own."""

from __future__ import annotations

import pytest
import torch

from mmspec.distributions.kernels import GaussianKernel
from mmspec.distributions.noise import KeyedNoise
from mmspec.drafters.denoising.frozen import Frozen
from mmspec.drafters.denoising.picard import Picard
from mmspec.drafters.denoising.window import Constant, Window
from mmspec.targets.continuous.denoising import ChainRequest, ChainTarget
from mmspec.verifiers.tolerance_window import ToleranceWindow
from tests.chains import mixture, vp_grid
from tests.drafters.denoising.toy_chains import CPU, run

STEPS = 7


@pytest.mark.parametrize("eta", [0.0, 1.0])
@pytest.mark.parametrize("drafter", [Frozen, Picard])
def test_the_last_state_is_not_drafted_even_where_steps_are_quiet(
    drafter: type[Frozen] | type[Picard], eta: float
) -> None:
    network = mixture(2, 4, 0).denoiser(GaussianKernel.ddim(*vp_grid(STEPS), eta=eta))
    wide = drafter(Window(None, Constant(), deterministic=True))
    done = run(wide, network, ToleranceWindow(1e6), batch=2)
    unseen = 1 if drafter is Picard else 0  # its first round has seen nothing, and drafts nothing
    assert max(draft.nodes for draft in done.drafts) == STEPS - 1 - unseen
    assert done.states.shape[1] == STEPS + 1
    slow = run(wide, network, ToleranceWindow(0.0), batch=2)
    for kept in slow.rounds:
        assert all(len(new) > kept.accepted[row] for row, new in enumerate(kept.tokens) if new)


def test_room_leaves_a_state_to_the_target() -> None:
    kernel = GaussianKernel.fixed_large(*vp_grid(STEPS))  # random in its last step as well
    assert all(kernel.is_random)
    target = ChainTarget(mixture(2, 4, 0).denoiser(kernel))
    context = target.prefill(ChainRequest(torch.zeros(1, 2), KeyedNoise.from_seed(0, 1, CPU)))
    for deterministic in (False, True):
        assert context.max_draft_lengths(100, deterministic) == [STEPS - 1]
        assert context.max_draft_lengths(3, deterministic) == [3]
