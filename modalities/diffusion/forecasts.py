"""Runs the pipeline's own loop, with its network taken over by forecasts for the time of a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mmspec.modalities.diffusion.network import pictures
from mmspec.modality import Loop
from mmspec.recipe import Kit, Recipe, resolve
from mmspec.stats import forecast_stats


class ForecastRunner:
    """A recipe that forecasts within the network; there are no rounds, only steps.

    Statistics count a step computed in full as a target call, a kept forecast as an accepted draft
    that nobody verified, and a rejected one as a refused draft.
    """

    own = ("seed",)
    sees = "nothing"

    def __init__(self, pipe: Any, recipe: Recipe) -> None:
        kit = Kit(pipe, None, recipe.execution, recipe.sees, None, recipe.options)
        self.pipe, self.recipe = pipe, recipe
        self.forecasting = recipe.architecture(kit).under(resolve(recipe.verifier, kit))

    def run(self, given: Mapping[str, Any], own: Mapping[str, Any], loop: Loop) -> Any:
        """What the pipeline returns. Raises ValueError where somebody waits for rounds."""
        seed = own["seed"]
        if loop.is_watched:
            raise ValueError(
                f"recipe {self.recipe.name or 'custom'!r} runs the pipeline's own loop and has no "
                "rounds to show; drop on_round= and stream(), or use a recipe that samples chains, "
                "such as 'asd'"
            )
        if seed is not None and given.get("generator") is not None:
            raise ValueError("seed= and generator= both choose the noise; give one of them")
        detach = self.forecasting.attach(self.pipe, pictures(given))
        try:
            output = self.pipe(**given) if seed is None else seeded(self.pipe, given, seed)
        finally:
            detach()
        done = detach.statistics
        loop.report(
            forecast_stats(
                self.recipe.name or "custom", done.full, done.forecast, done.rejected, done.errors
            )
        )
        return output


def seeded(pipe: Any, given: Mapping[str, Any], seed: int) -> Any:
    """A pipeline's own call, all of its noise coming from `seed`.

    The global generator is set for the time of the call: not all steps take another.
    """
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(int(seed))
        return pipe(**{**given, "generator": torch.Generator().manual_seed(int(seed))})
