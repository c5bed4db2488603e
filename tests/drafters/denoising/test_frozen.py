"""The frozen draft: exact for every frozen quantity, fast for the right one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mmspec.distributions.gaussian import DrivingNoise
from mmspec.distributions.kernels import GaussianKernel
from mmspec.drafters.denoising.freeze import FREEZES, Clean, Freeze
from mmspec.drafters.denoising.frozen import ROOTS, Frozen, Prefetch, Refresh
from mmspec.drafters.denoising.window import Mismatch, Window
from mmspec.errors import choose_option
from mmspec.recipe import pair
from mmspec.targets.continuous.denoising import Prediction
from mmspec.verifiers.gaussian_block import GaussianBlock
from mmspec.verifiers.gaussian_ratio import GaussianRatio
from mmspec.verifiers.sequence import Sequence
from tests.chains import mixture, vp_grid
from tests.covering import covering, limited
from tests.drafters.denoising.toy_chains import Steep, denoiser, distance, plain, run, surprise

KERNELS = {
    "ancestral": GaussianKernel.ancestral(*vp_grid(12)),
    "ddim": GaussianKernel.ddim(*vp_grid(12), eta=0.5),
    "flow": GaussianKernel.ancestral(
        1 - torch.linspace(0.99, 0, 13).double(), torch.linspace(0.99, 0, 13).double()
    ),
}

STEEP = Steep(GaussianKernel.ancestral(*vp_grid(12)))


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("freeze", FREEZES.values(), ids=FREEZES)
def test_freezing_and_moving_are_inverse_at_one_state(
    freeze: Freeze, kernel: GaussianKernel
) -> None:
    step = torch.arange(12).expand(3, -1)
    x, clean = torch.randn(2, 3, 12, 4, 5).double()
    memory = freeze.freeze(kernel, x, clean, step)
    assert_close(freeze.mean(kernel, memory, x, step), kernel.mean(x, clean, step))


def test_what_stays_the_same_is_what_is_frozen() -> None:
    kernel, step = KERNELS["ancestral"], torch.tensor([5])
    x, clean = torch.randn(2, 1, 3).double()
    for freeze in FREEZES.values():
        memory = freeze.freeze(kernel, x, clean, step)
        mean = freeze.mean(kernel, memory, x + 1, step + 2)
        seen = (mean - kernel.mean(x + 1, torch.zeros_like(x), step + 2)) / kernel.clean[7]
        assert_close(freeze.freeze(kernel, x + 1, seen, step + 2), memory)


@pytest.mark.parametrize(
    ("freeze", "root"), limited(covering(tuple(FREEZES), tuple(ROOTS), strength=1), 3)
)
def test_increments_are_those_of_the_sampler(freeze: str, root: str) -> None:
    done = run(Frozen(Window.constant(6), FREEZES[freeze], ROOTS[root]), STEEP, batch=800)
    assert surprise(done) < 4.5


def test_samples_have_the_distribution_of_plain_sampling() -> None:
    """Kolmogorov-Smirnov against other noise, each coordinate; false alarm 1e-4."""
    network = denoiser(12)
    fast = run(Frozen(), network, batch=1500, seed=1).states[:, -1]
    slow = plain(network, batch=1500, seed=2).states[:, -1]
    assert distance(fast[:, 0], slow[:, 0]) < 2.3
    assert distance(fast[:, 1], slow[:, 1]) < 2.3
    assert distance(fast[:, 0] + 0.4, slow[:, 0]) > 2.3  # what the test would notice


@pytest.mark.parametrize("freeze", FREEZES.values(), ids=FREEZES)
def test_a_fresh_root_is_accepted_for_sure(freeze: Freeze) -> None:
    done = run(Frozen(Window.constant(4), freeze), denoiser(20, d=64), shape=(4, 16), batch=4)
    begun = [True] * 4
    for kept in done.rounds:
        for row in range(4):
            if begun[row] and kept.drafted[row]:
                assert kept.accepted[row] >= 1
            begun[row] = kept.accepted[row] < kept.drafted[row]


def test_a_window_of_one_is_plain_sampling() -> None:
    network = denoiser(15)
    done = run(Frozen(Window.constant(1)), network, batch=3, max_rows=1)
    assert torch.equal(done.states, plain(network, batch=3, max_rows=1).states)
    assert done.calls == 15


@dataclass(frozen=True)
class Still:
    """A denoiser with constant output: a frozen draft of it is perfect."""

    kernel: GaussianKernel
    width: int = 1

    def predict(self, states: Tensor, step: Tensor, row: Tensor) -> Prediction:
        return Prediction(torch.full_like(states, 0.5))


@dataclass(frozen=True)
class Mad:
    """Freezes an absurd quantity."""

    def freeze(self, kernel: GaussianKernel, x: Tensor, clean: Tensor, step: Tensor) -> Tensor:
        return clean + 1e4

    def mean(self, kernel: GaussianKernel, memory: Tensor, x: Tensor, step: Tensor) -> Tensor:
        return kernel.mean(x, memory, step)


def test_a_perfect_draft_takes_one_call_a_window() -> None:
    still = Still(GaussianKernel.ancestral(*vp_grid(20)))
    slow = plain(still).states
    for window in (2, 5, 7, 20):
        refreshed = run(Frozen(Window.constant(window)), still)
        assert refreshed.calls == 1 + -(-20 // window)  # and one look at the start
        ahead = run(Frozen(Window.constant(window), root=Prefetch()), still)
        assert ahead.calls == 1 + -(-19 // window)  # the first state warms up
        assert torch.equal(refreshed.states, slow)
        assert torch.equal(ahead.states, slow)


def test_a_hostile_draft_costs_calls_and_nothing_else() -> None:
    network = STEEP
    fetched = run(Frozen(Window.constant(5), Mad(), Prefetch()), network, batch=500)
    assert sum(sum(kept.accepted) for kept in fetched.rounds) == 0
    assert fetched.calls == 12
    assert surprise(fetched) < 4.5
    refreshed = run(Frozen(Window.constant(5), Mad()), network, batch=500)
    assert {row for kept in refreshed.rounds for row in kept.accepted} == {1}  # the sure first
    assert refreshed.calls == 12  # two calls for two states
    assert surprise(refreshed) < 4.5


@pytest.mark.exhaustive
def test_speedups_are_those_of_the_theory_and_stand_in_its_order() -> None:
    """Steps over calls at d = 64, 100 steps of DDPM, window 20; ideal denoiser, 8 components."""
    network = denoiser(100, d=64, components=8)
    found = {}
    for name, freeze in FREEZES.items():
        drafter = Frozen(Window.constant(20), freeze)
        calls = [run(drafter, network, shape=(64,), seed=seed).calls for seed in range(3)]
        found[name] = 300 / sum(calls)
    assert found["clean"] == pytest.approx(4.9, rel=0.2)
    assert found["velocity"] == pytest.approx(3.7, rel=0.2)
    assert found["increment"] == pytest.approx(1.9, rel=0.2)
    assert found["noise"] == pytest.approx(1.5, rel=0.2)
    assert found["clean"] > found["velocity"] > found["increment"] > found["noise"]


@pytest.mark.exhaustive
def test_the_order_holds_in_many_dimensions() -> None:
    network = denoiser(100, d=1024, components=8)
    found = {
        name: run(Frozen(Window.constant(20), freeze), network, shape=(1024,)).speedup
        for name, freeze in FREEZES.items()
    }
    assert found["clean"] > found["velocity"] > found["increment"] > found["noise"]
    assert found["noise"] < 1.1


@pytest.mark.parametrize(
    "window", [Window(), Window(pace=Mismatch()), Window.tree((2, 2))], ids=str
)
def test_a_row_does_not_notice_its_batch(window: Window) -> None:
    network, ids = denoiser(20), [7, 3, 11, 2]
    verifier = Sequence()
    drafter = Frozen(window)
    together = run(drafter, network, verifier, batch=4, row_ids=ids, max_rows=1)
    assert any(len(set(kept.accepted)) > 1 for kept in together.rounds)  # at their own pace
    for row, one in enumerate(ids):
        alone = run(drafter, network, verifier, row_ids=[one], max_rows=1)
        assert torch.equal(together.states[row], alone.states[0])


def test_siblings_are_independent_and_the_first_has_the_noise_of_the_step() -> None:
    done = run(Frozen(Window.tree((3, 2))), STEEP, Sequence(), batch=1000)
    assert surprise(done) < 4.5
    draft = next(draft for draft in done.drafts if draft.nodes)
    assert isinstance(draft.extras, DrivingNoise)
    noise = draft.extras.noise
    assert draft.tree is not None
    shared = done.context.noise.shared_keys(torch.tensor([[1, 2]])).normal(2)
    firsts = {kids[0] for kids in draft.tree.children if kids}
    for node, depth in enumerate(draft.tree.depths):
        same = torch.equal(noise[:, node], shared[:, depth])
        assert same == (node in firsts)
    fresh = [node for node in range(draft.nodes) if node not in firsts]
    corner = torch.corrcoef(noise[:, fresh].flatten(1).T)
    assert float((corner - torch.eye(len(corner))).abs().max()) < 4.5 / 1000**0.5


def test_siblings_raise_the_acceptance() -> None:
    network = denoiser(40, d=64)
    chain, tree = (
        run(Frozen(Window.tree(widths)), network, Sequence(), shape=(64,), batch=16)
        for widths in ((1, 1, 1), (3, 2, 1))
    )
    accepted = [sum(map(sum, (kept.accepted for kept in one.rounds))) for one in (chain, tree)]
    rounds = [len(one.rounds) for one in (chain, tree)]
    assert accepted[1] / rounds[1] > accepted[0] / rounds[0]


def test_a_verifier_that_looks_ahead_gets_new_noise_every_round() -> None:
    done = run(Frozen(Window.constant(6)), denoiser(12), batch=1)
    drafter = pair(Frozen(Window.constant(6)), GaussianBlock(), done.target)
    assert surprise(run(drafter, STEEP, GaussianBlock(), batch=800)) < 4.5


@dataclass(frozen=True)
class Wide:
    """A denoiser with a predicted std: the kernel's times 1.3, or times a function of the state."""

    kernel: GaussianKernel
    varies: bool
    width: int = 1

    def predict(self, states: Tensor, step: Tensor, row: Tensor) -> Prediction:
        inner = mixture(2, 4, 0).denoiser(self.kernel).predict(states, step, row)
        ratio = 1.3 + (0.3 * torch.tanh(states) if self.varies else torch.zeros_like(states))
        return replace(inner, std=ratio * self.kernel.std_at(step, states))


def test_a_predicted_std_keeps_its_ratio_to_the_kernels() -> None:
    kernel = GaussianKernel.ancestral(*vp_grid(20))
    done = run(Frozen(Window.constant(5)), Wide(kernel, False), batch=4)  # refuses unequal ones
    assert done.calls < 20
    varying = run(Frozen(Window.constant(5)), Wide(kernel, True), GaussianRatio(), batch=4)
    assert varying.calls < 20


def test_a_chain_that_starts_without_signal_can_be_drafted() -> None:
    alpha, sigma = vp_grid(12)
    alpha[0], sigma[0] = 0.0, 1.0
    network = mixture(2, 4, 0).denoiser(GaussianKernel.ancestral(alpha, sigma))
    for freeze in FREEZES.values():
        done = run(Frozen(Window.constant(5), freeze), network, batch=200)
        assert bool(done.states.isfinite().all())
        assert surprise(done) < 4.5


def test_steps_without_noise_are_never_drafted() -> None:
    kernel = GaussianKernel.ancestral(*vp_grid(12))
    silent = torch.arange(12) % 4 == 3
    network = mixture(2, 4, 0).denoiser(kernel.deterministic(silent))
    done = run(Frozen(Window.constant(8)), network, batch=4)
    drafted = [draft.distribution.std[draft.mask] for draft in done.drafts if draft.nodes]  # type: ignore
    assert all(bool((std > 0).all()) for std in drafted)
    assert done.calls < 12


def test_names() -> None:
    assert (
        choose_option("freeze", "clean", FREEZES)
        == Clean()
        == choose_option("freeze", Clean(), FREEZES)
    )
    assert (
        choose_option("root", "refresh", ROOTS)
        == Refresh()
        == choose_option("root", Refresh(), ROOTS)
    )
    with pytest.raises(ValueError, match="freeze='x0' is not known; choose one of clean, velocity"):
        choose_option("freeze", "x0", FREEZES)
    with pytest.raises(ValueError, match="root=3 is not known; choose one of refresh"):
        choose_option("root", 3, ROOTS)
