"""Helpers of pipeline tests: recipes with one part each, and a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mmspec.draft import Drafter
from mmspec.drafters.denoising.frozen import Frozen
from mmspec.drafters.denoising.window import Window
from mmspec.drafters.plain import no_drafter
from mmspec.modalities.diffusion.network import Network
from mmspec.modalities.diffusion.noise_replay import replay_noise
from mmspec.modalities.diffusion.pipeline_trace import PreparedCall, run_pipeline
from mmspec.recipe import Kit, Recipe
from mmspec.verifiers.coupled import Coupled
from mmspec.verifiers.reflection import Reflection
from tests.toys.pipelines import build_request, pipeline

STEPS = 6


@lru_cache
def shared_pipeline(name: str) -> Any:
    """A pipeline that no test changes; `test_nothing_is_written_onto_the_pipeline` allows it."""
    return pipeline(name)


def frozen(kit: Kit) -> Drafter:
    return Frozen(kit.shape)


PLAIN = Recipe(no_drafter, Window.constant(1), Coupled(), decodes="latents")
COPIES = Recipe(frozen, Window.constant(4), Coupled(), decodes="latents")  # keeps what equals plain
FROZEN = Recipe(frozen, Window.constant(4), Reflection(), decodes="latents")


def pixels(output: Any) -> Tensor:
    """What an output shows."""
    found = output.images if "images" in output else output.frames
    return torch.as_tensor(found)


def draw(fast: Any, name: str, count: int = 2, **more: Any) -> Tensor:
    shown = "pt" if name in ("dit", "ltx") else "np"
    settings = {"num_inference_steps": STEPS, "output_type": shown, **more}
    return pixels(fast(**{**build_request(name, count), **settings}))


def run_pipeline_alone(
    pipe: Any,
    images: int,
    call: Callable[[torch.Generator], Tensor],
    free: Tensor | None = None,
) -> Tensor:
    """The output of a pipeline alone with generator 5, its scheduler given the noise of the chain.

    That is keyed by a number drawn from the generator after the first state, and drawn for the
    places `free` (*E) bool, if not for all.
    """
    generator = torch.Generator().manual_seed(5)
    with replay_noise(pipe.scheduler, images, generator, free):
        return call(generator)


def prepare_call(pipe: Any, given: dict[str, Any]) -> PreparedCall:
    """The prepared call that the loop samples."""
    found: list[PreparedCall] = []

    def act(opening: PreparedCall) -> Tensor:
        found.append(opening)
        return opening.start

    known = inspect.signature(pipe.__call__).parameters.items()
    defaults = {name: one.default for name, one in known if one.default is not one.empty}
    settings = {"num_inference_steps": STEPS, "output_type": "latent"}
    run_pipeline(pipe, Network(pipe), {**defaults, **settings, **given}, act)
    return found[0]


@torch.no_grad()
def check_rows(pipe: Any, given: dict[str, Any]) -> None:
    """States of any steps in one call of the networks are what they are alone."""
    opening = prepare_call(pipe, given)
    steps = torch.arange(len(opening.timesteps)).flip(0).repeat(2)
    states = torch.randn(len(steps), *opening.start.shape[1:])
    rows = torch.zeros_like(steps)
    together = opening.denoiser.predict(states, steps, rows).clean
    each = zip(states.split(1), steps.split(1), rows.split(1), strict=True)
    apart = torch.cat([opening.denoiser.predict(*one).clean for one in each])
    assert apart.std() > 0.05
    torch.testing.assert_close(together, apart, atol=2e-4 * float(apart.std()), rtol=1e-4)
