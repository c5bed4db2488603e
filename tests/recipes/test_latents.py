"""Recipes that decode latents: bound to a chain as the pipeline binds them, run, and exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mmspec import recipes
from mmspec.distributions.gaussian import DrivingNoise
from mmspec.distributions.kernels import GaussianKernel
from mmspec.draft import Drafter, Verifier
from mmspec.drafters.denoising.window import Window
from mmspec.recipe import Kit, Recipe, pair, resolve
from mmspec.targets.continuous.denoising import ChainTarget
from tests.chains import vp_grid
from tests.covering import exhaustive
from tests.drafters.denoising.toy_chains import Run, Steep, Varying, denoiser, run, surprise

NAMES = tuple(
    name for name in recipes.names("latents") if isinstance(recipes.get(name).execution, Window)
)
STEEP = Steep(GaussianKernel.ancestral(*vp_grid(12)))
EXACT = tuple(name for name in NAMES if recipes.get(name).exact)
ONE_OF_A_KIND = ("accelerated-diffusion-secant", "asd", "asd-tree", "block-diffusion")


def bound(recipe: Recipe, network: Any, **options: Any) -> tuple[Drafter, Verifier]:
    target = ChainTarget(network)
    small = ChainTarget(network) if recipe.takes_drafter else None
    chosen = {**recipe.options, **options}
    kit = Kit(target, small, recipe.execution, recipe.sees, None, chosen)
    verifier = resolve(recipe.verifier, kit)
    return pair(recipe.architecture(kit), verifier, target), verifier


def ran(name: str, network: Any, **settings: Any) -> Run:
    recipe = recipes.get(name)
    drafter, verifier = bound(recipe, network)
    return run(drafter, network, verifier, **settings)


def test_the_methods_are_there() -> None:
    assert {
        "accelerated-diffusion",
        "accelerated-diffusion-carried",
        "accelerated-diffusion-corrected",
        "accelerated-diffusion-frozen",
        "accelerated-diffusion-secant",
        "asd",
        "asd-tree",
        "block-diffusion",
        "paradigms",
    } <= set(NAMES)
    assert [name for name in NAMES if not recipes.get(name).exact] == ["paradigms"]


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_saves_calls(name: str) -> None:
    done = ran(name, denoiser(60), batch=2)
    assert done.calls < 45
    assert bool(done.states.isfinite().all())


@pytest.mark.parametrize("name", EXACT)
def test_an_exact_recipe_has_the_increments_of_the_sampler(name: str) -> None:
    assert surprise(ran(name, STEEP, batch=600)) < 4.5


@pytest.mark.parametrize("name", exhaustive(EXACT, ONE_OF_A_KIND))
def test_predicted_deviations_are_exact_or_refused_before_anything_runs(name: str) -> None:
    """A learned variance gives target and draft other deviations in every step."""
    network = Varying(replace(STEEP.kernel, is_predicted=True))
    if name in ("asd-tree", "block-diffusion"):
        with pytest.raises(ValueError, match=r"the network predicts it.*use the recipe"):
            ran(name, network)
        return
    done = ran(name, network, batch=600)
    assert surprise(done) < 4.5
    assert done.calls < 2 * STEEP.kernel.num_steps  # the slowest of 600 rows, two calls a refusal
    accepted = [sum(kept.accepted) for kept in done.rounds]
    assert sum(accepted) > 600


def test_asd_is_the_frozen_clean_sample_bit_for_bit() -> None:
    network = denoiser(30, d=16)
    one, two = recipes.get("asd"), recipes.get("accelerated-diffusion-frozen")
    left, _ = bound(one, network)
    right, _ = bound(two, network, freeze="clean", root="refresh")
    runs = [run(drafter, network, shape=(16,), batch=3) for drafter in (left, right)]
    assert torch.equal(runs[0].states, runs[1].states)
    assert runs[0].calls == runs[1].calls


def test_asd_drafts_euler_steps_of_stochastic_localisation() -> None:
    """y = s x / alpha and y' = y + (s' - s) x0 + (s' - s)^.5 z, s = alpha^2 / sigma^2 (Hu 2025)."""
    network = denoiser(30, d=4)
    recipe = replace(recipes.get("asd"), execution=Window.constant(8))
    done = run(bound(recipe, network)[0], network, shape=(4,))
    draft, start, kernel = done.drafts[0], done.states[:, 0].double(), network.kernel
    assert isinstance(draft.extras, DrivingNoise)
    s = (kernel.alpha / kernel.sigma) ** 2
    first = torch.zeros(1, dtype=torch.int64)
    clean = network.predict(start.float(), first, first).clean.double()
    y = start * s[0] / kernel.alpha[0]
    for node in range(7):
        rise = s[node + 1] - s[node]
        y = y + rise * clean + rise.sqrt() * draft.extras.noise[:, node].double()
        x = (y * kernel.alpha[node + 1] / s[node + 1]).float()
        torch.testing.assert_close(draft.tokens[:, node], x, rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_is_refused_when_it_is_bound() -> None:
    network = denoiser(6)
    recipe = recipes.get("asd")
    with pytest.raises(ValueError, match="window of 9 states is longer than the chain, which has"):
        bound(replace(recipe, execution=Window.constant(9)), network)
    with pytest.raises(ValueError, match="root='soon' is not known"):
        bound(recipe, network, root="soon")
    with pytest.raises(ValueError, match="verifies chains"):
        bound(replace(recipe, execution=Window.tree((2, 2))), network)
    with pytest.raises(ValueError, match="drafted in windows"):
        bound(replace(recipe, execution="chain"), network)
