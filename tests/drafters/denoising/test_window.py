"""How far a chain is drafted: bounds, paces, and what they depend on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from mmspec.distributions.gaussian import Gaussian
from mmspec.distributions.kernels import GaussianKernel
from mmspec.drafters.denoising.frozen import Frozen
from mmspec.drafters.denoising.window import (
    AdditivePace,
    Constant,
    Mismatch,
    Window,
    WindowUpdate,
    mismatch_growth,
)
from mmspec.recipe import Recipe
from mmspec.recipes import asd
from mmspec.targets.continuous.denoising import Prediction
from tests.chains import mixture, vp_grid
from tests.drafters.denoising.toy_chains import Run, denoiser, run


@pytest.mark.parametrize("is_noisy", [False, True], ids=["silent", "noisy"])
def test_a_window_is_never_exceeded_and_never_reaches_the_last_state(is_noisy: bool) -> None:
    """Not even where the last step draws noise too, as one to a noisy level does."""
    alpha, sigma = vp_grid(21)
    noisy = mixture(2, 4, 0).denoiser(GaussianKernel.ancestral(alpha[:-1], sigma[:-1]))
    network = noisy if is_noisy else denoiser(20)
    assert network.kernel.is_random[-1] is is_noisy
    done = run(Frozen(Window.constant(7)), network, batch=3)
    at = [0, 0, 0]
    for kept in done.rounds:
        for row in range(3):
            assert kept.drafted[row] <= min(6, max(20 - at[row] - 1, 0))
            at[row] += len(kept.tokens[row])
    assert at == [20, 20, 20]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Window.constant(0), "window=0 must be a whole number of at least 1"),
        (lambda: Window(-3), "window=-3 must be a whole number of at least 1"),
        (lambda: Window.tree((2, 0)), "has a level without a child"),
        (
            lambda: Window.constant(21).check(20),
            "of 21 states is longer than the chain, which has 20",
        ),
        (lambda: AdditivePace(start=1), "start=1"),
        (lambda: AdditivePace(start=4, min_states=5), "min_states=5"),
        (lambda: Mismatch(max_deviations=0.0), r"max_deviations=0\.0 must be positive"),
        (
            lambda: Mismatch(min_states=2),
            "min_states=2 and start=8 3 or more",
        ),  # would learn nothing
        (lambda: Constant(0), "a pace of 0 states"),
    ],
)
def test_what_makes_no_sense_is_refused(make: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()  # type: ignore[operator]


def test_all_windows_up_to_the_chain_are_fine() -> None:
    Window.constant(20).check(20)
    Window().check(1)
    assert run(Frozen(Window.constant(20)), denoiser(20)).calls < 20


def test_a_tree_branches_first_and_goes_on_as_chains() -> None:
    window = Window(6, Constant(), (3, 2))
    tree = window.topology(4)
    assert [len(level) for level in tree.levels] == [3, 6, 6, 6]
    assert window.topology(1).nodes == 3
    assert Window(6).topology(4).is_chain
    assert Window.tree((3, 2)).max_states == 3


def test_words() -> None:
    assert Window.constant(8).description == "window of 8 states"
    assert "window of all states, paced by AdditivePace(" in Window().description
    assert Window.tree((3, 2)).description == "tree of 3 x 2 states in a window of 3"
    tree: Recipe = replace(asd.RECIPE, execution=Window.tree((3, 2)))
    assert tree.axes()["verification execution"] == "tree, one pass"
    assert asd.RECIPE.axes()["verification execution"] == "linear, one pass"


@dataclass(frozen=True)
class Calming:
    """A denoiser that depends on the state up to step 20, and is constant after it."""

    kernel: GaussianKernel
    width: int = 1

    def predict(self, states: Tensor, step: Tensor, row: Tensor) -> Prediction:
        early = (step < 20).reshape(-1, *(1,) * (states.dim() - 1))
        return Prediction(torch.where(early, 4 * torch.sin(9 * states), 0.3))


def windows(done: Run, row: int = 0) -> list[int]:
    return [kept.drafted[row] + 1 for kept in done.rounds]


def test_the_additive_pace_follows_what_was_committed() -> None:
    done = run(Frozen(Window(pace=AdditivePace(start=6))), denoiser(100, d=16), shape=(16,))
    seen = windows(done)
    assert seen[0] == 6
    for kept, now, then in zip(done.rounds, seen, seen[1:], strict=False):
        left = 100 - sum(len(r.tokens[0]) for r in done.rounds[: kept.index + 1])
        whole = kept.accepted[0] == kept.drafted[0]
        target_sizes = now + 1 if whole else max(2, -(-3 * (kept.accepted[0] + 1) // 2))
        assert then == min(target_sizes, left)


def test_the_mismatch_grows_as_the_theory_says() -> None:
    """One round Gaussian of variance 1: mmse(s) = d / (1 + s), so the fitted c must be d."""
    kernel, d = GaussianKernel.ancestral(*vp_grid(60, "linear")), 256
    network = replace(mixture(d, 1, 0), std=torch.ones(1).double()).denoiser(kernel)
    grid = ((kernel.alpha / kernel.sigma)[:-1] ** 2).tolist()
    done = run(Frozen(Window.constant(10)), network, shape=(d,), batch=64)
    draft = done.drafts[0]  # drafted from the start, where the root was seen
    assert isinstance(draft.distribution, Gaussian)
    chain = torch.cat((done.context.state[:, None], draft.tokens[:, :-1]), 1).flatten(0, 1)
    steps = torch.arange(9).repeat(64)
    seen = network.predict(chain, steps, steps).clean.view_as(draft.tokens)
    frozen = seen[:, :1]
    gap = (kernel.clean[:9, None] * (seen - frozen) / kernel.std[:9, None]).square().sum(-1)
    for k in (3, 5, 8):
        assert float(gap[:, k].mean()) == pytest.approx(d * mismatch_growth(grid, 0, k), rel=0.1)


def test_the_mismatch_pace_recovers() -> None:
    """Steep at first, flat later: short windows must not prevent adaptation."""
    kernel = GaussianKernel.ancestral(*vp_grid(80))
    done = run(Frozen(Window(pace=Mismatch())), Calming(kernel), shape=(16,))
    assert min(windows(done)[3:8]) <= 4
    assert max(windows(done)[8:]) >= 10


def test_the_mismatch_pace_stops_where_rejection_is_likely() -> None:
    network = denoiser(100, d=64, components=8)
    few = run(Frozen(Window(pace=Mismatch(1.0))), network, shape=(64,))
    some = run(Frozen(Window(pace=Mismatch(2.0))), network, shape=(64,))
    all_ = run(Frozen(Window.constant(60)), network, shape=(64,))
    assert few.rows < some.rows < all_.rows
    assert some.calls < 1.4 * all_.calls


def test_a_pace_does_not_see_what_lies_behind_a_rejection() -> None:
    pace, done = Mismatch(), run(Frozen(Window.constant(10)), denoiser(40, d=64), shape=(64,))
    at = next(i for i, kept in enumerate(done.rounds) if 1 < kept.accepted[0] < 6)
    draft, kept = done.drafts[at], done.rounds[at]
    step = sum(len(old.tokens[0]) for old in done.rounds[: at + 1])
    context = replace(done.context, step=(step,))
    states = torch.cat((draft.tokens[:, :1], draft.tokens), 1)  # any, the same in both
    clean = torch.zeros_like(states)
    distribution = Gaussian(states, torch.ones(1, draft.nodes + 1, 1), 1)
    scores = type("Said", (), {"distribution": distribution, "features": {"clean": clean}})()
    levels = [draft.nodes]
    seen = pace.observe([None], WindowUpdate(context, draft, scores, kept, levels))
    assert isinstance(draft.distribution, Gaussian)
    mean = draft.distribution.mean.clone()
    mean[:, kept.accepted[0] + 1 :] += 100.0
    behind = replace(draft, distribution=replace(draft.distribution, mean=mean))
    assert pace.observe([None], WindowUpdate(context, behind, scores, kept, levels)) == seen
    mean[:, kept.accepted[0]] += 100.0
    before = replace(draft, distribution=replace(draft.distribution, mean=mean))
    assert pace.observe([None], WindowUpdate(context, before, scores, kept, levels)) != seen
