"""ParaDiGMS beside the authors' algorithm, both measured against sequential sampling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

import mmspec
from mmspec import recipes
from mmspec.distributions.noise import KeyedNoise
from mmspec.drafters.denoising.window import Constant, Window
from mmspec.recipe import Recipe
from mmspec.targets.continuous.denoising import Denoiser
from mmspec.verifiers.tolerance_window import ToleranceWindow
from tests.drafters.denoising.toy_chains import CPU, denoiser, plain, run
from tests.recipes.test_latents import bound
from tests.toys.pipelines import build_request, pipeline

D, STEPS, SEEDS = 16, 50, 12


def published(
    network: Denoiser, window: int, tolerance: float, seed: int
) -> tuple[Tensor, int]:  # (N + 1, D), calls
    """One chain by the authors' loop (diffusers' StableDiffusionParadigmsPipeline, 0.42).

    The window is moved by the sum of its increments, up to and with the first state that moved by
    more than the tolerance times the noise of the step that leaves it.
    """
    kernel, noise = network.kernel, KeyedNoise.from_seed(seed, 1, CPU)
    drawn = noise.shared_keys(torch.arange(kernel.num_steps + 1)[None]).normal(D)[0]  # (N + 1, D)
    states = drawn[:1].expand(kernel.num_steps + 1, D).clone()
    scale = torch.cat((kernel.noise_scale[1:], torch.zeros(1)))
    begin = calls = 0
    while begin < kernel.num_steps:
        here = torch.arange(begin, min(begin + window, kernel.num_steps))
        inside, after = states[here], states[here + 1]
        clean = network.predict(inside, here, torch.zeros_like(here)).clean
        moved = kernel.mean(inside, clean, here) + kernel.std_at(here, inside) * drawn[here + 1]
        new = states[begin] + (moved - inside).cumsum(0)
        off = (new - after).square().mean(1) > (tolerance * scale[here]) ** 2
        states[here + 1], states[here[-1] + 1 :] = new, new[-1]
        begin += min(int(off.int().argmax()) + 1 if bool(off.any()) else len(here), len(here))
        calls += 1
    return states, calls


def ours(recipe: Recipe, network: Denoiser, seed: int) -> tuple[Tensor, int]:
    drafter, verifier = bound(recipe, network)
    done = run(drafter, network, verifier, shape=(D,), seed=seed)
    return done.states[0], done.calls


def test_window_and_tolerance_are_the_published_ones() -> None:
    recipe = recipes.get("paradigms")
    assert recipe.execution == Window(pace=Constant(10), deterministic=True)
    assert recipe.verifier == ToleranceWindow(0.1)


def test_the_reference_without_tolerance_is_the_sequential_chain() -> None:
    network = denoiser(STEPS, D)
    states, calls = published(network, 10, 0.0, 0)
    torch.testing.assert_close(states, plain(network, shape=(D,)).states[0], atol=1e-4, rtol=0)
    assert calls < STEPS


@pytest.mark.exhaustive
def test_at_as_many_calls_the_error_is_about_the_authors() -> None:
    """Root mean square of the last state, against the sequential chain of the same noise."""
    network, recipe = denoiser(STEPS, D), recipes.get("paradigms")
    found: dict[str, list[tuple[float, int]]] = {"theirs, 0.1": [], "theirs, 0.3": [], "ours": []}
    for seed in range(SEEDS):
        right = plain(network, shape=(D,), seed=seed).states[0, -1]
        made = {
            "theirs, 0.1": published(network, 10, 0.1, seed),
            "theirs, 0.3": published(network, 10, 0.3, seed),
            "ours": ours(recipe, network, seed),
        }
        for name, (states, calls) in made.items():
            found[name].append((float((states[-1] - right).square().mean().sqrt()), calls))
    mean = {name: sum(one[0] for one in pairs) / SEEDS for name, pairs in found.items()}
    most = {name: max(one[0] for one in pairs) for name, pairs in found.items()}
    took = {name: sum(one[1] for one in pairs) / SEEDS for name, pairs in found.items()}
    assert took["ours"] < 0.95 * took["theirs, 0.1"]  # and errs more, at the same tolerance
    assert mean["theirs, 0.1"] < mean["ours"]
    assert abs(took["ours"] - took["theirs, 0.3"]) < 1  # at as many calls it does not
    assert mean["ours"] < 1.3 * mean["theirs, 0.3"]
    assert most["ours"] < 1.3 * most["theirs, 0.3"]


@pytest.mark.exhaustive
def test_the_error_grows_with_the_tolerance() -> None:
    network, errors = denoiser(STEPS, D), []
    for tolerance in (0.0, 0.1, 1.0):
        recipe = replace(recipes.get("paradigms"), verifier=ToleranceWindow(tolerance))
        off = [
            ours(recipe, network, seed)[0][-1] - plain(network, shape=(D,), seed=seed).states[0, -1]
            for seed in range(4)
        ]
        errors.append(float(torch.stack(off).square().mean().sqrt()))
    assert errors[0] < 1e-5 < errors[1] < errors[2]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "width", "images"), [("ddpm", 1, 1), ("flux", 1, 2), ("dit", 2, 1)]
)
def test_without_tolerance_the_result_is_the_sequential_one_bit_for_bit(
    name: str, width: int, images: int
) -> None:
    """Where every forward has the rows of one state, as in the sequential control.

    A tolerance, and another number of rows in a forward, give other bits: the first by what it
    accepts, the second by rounding, which depends on the shape.
    """
    pipe = pipeline(name)
    if name == "flux":  # deterministic, as shipped
        pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler()

    def sample(verifier: ToleranceWindow, **parts: Any) -> tuple[Tensor, Any]:
        fast: Any = mmspec.accelerate(pipe, "paradigms", verifier=verifier, **parts)
        out = fast(
            **build_request(name, images), num_inference_steps=12, seed=5, output_type="latent"
        )  # ddpm: pixels
        return torch.as_tensor(out[0]), fast.last_stats

    exact, state = ToleranceWindow(0.0), {"max_rows": width}
    sequential, plain = sample(exact, window=1, **state)
    found, stats = sample(exact, window=6, **state)
    assert torch.equal(found, sequential)
    assert stats.exact
    assert stats.network_rows > 2 * plain.network_rows  # windows were computed
    lossy, fewer = sample(ToleranceWindow(0.1), window=6, **state)
    assert fewer.target_calls < plain.target_calls
    assert not torch.equal(lossy, sequential)
    whole, _ = sample(exact, window=6)
    torch.testing.assert_close(whole, sequential, atol=1e-3, rtol=0)
    assert float((lossy - sequential).abs().max()) > 10 * float((whole - sequential).abs().max())
