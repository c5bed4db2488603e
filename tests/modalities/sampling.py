"""What tests of pipelines share: recipes that name one part each, and a call."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mmspec.draft import Drafter
from mmspec.drafters.denoising.frozen import Frozen
from mmspec.drafters.denoising.window import Window
from mmspec.drafters.plain import no_drafter
from mmspec.recipe import Kit, Recipe
from mmspec.verifiers.coupled import Coupled
from mmspec.verifiers.reflection import Reflection
from tests.toys.pipelines import asked, pipeline

STEPS = 6


@lru_cache
def shared(name: str) -> Any:
    """A pipeline that no test changes; `test_nothing_is_written_onto_the_pipeline` allows it."""
    return pipeline(name)


def frozen(kit: Kit) -> Drafter:
    return Frozen(kit.shape)


PLAIN = Recipe(no_drafter, Window.fixed(1), Coupled(), decodes="latents")
COPIES = Recipe(frozen, Window.fixed(4), Coupled(), decodes="latents")  # keeps what equals plain
FROZEN = Recipe(frozen, Window.fixed(4), Reflection(), decodes="latents")


def pixels(output: Any) -> Tensor:
    """What an output shows."""
    found = output.images if "images" in output else output.frames
    return torch.as_tensor(found)


def draw(fast: Any, name: str, count: int = 2, **more: Any) -> Tensor:
    shown = "pt" if name in ("dit", "ltx") else "np"
    settings = {"num_inference_steps": STEPS, "output_type": shown, **more}
    return pixels(fast(**{**asked(name, count), **settings}))
