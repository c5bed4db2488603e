"""From what a user types to a pipeline that draws: pipelines, draft pipelines, arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmspec.cli import inputs as given
from mmspec.cli.modality import DIFFUSION

MODEL = "zoo:diffusion"
RECIPE = "asd"
AS_TYPED = {"use_resolution_binning": False, "clean_caption": False}  # where a pipeline has them


@dataclass(frozen=True)
class Painter:
    """A pipeline, the recipe's draft pipeline if it takes one, and arguments of every call."""

    pipe: Any
    recipe: str
    drafter: Any | None
    names: tuple[str, str | None]  # as typed: target, drafter
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def is_zoo(self) -> bool:
        return self.names[0].startswith("zoo:")

    def asked(self, prompts: Sequence[str]) -> dict[str, Any]:
        """Arguments of a call that draws these; class numbers where the pipeline takes no text."""
        known = inspect.signature(self.pipe.__call__).parameters
        if "prompt" in known:
            return {"prompt": list(prompts), **self.settings}
        if "class_labels" in known:
            labels = [given.class_number(prompt) for prompt in prompts]
            return {"class_labels": labels, **self.settings}
        return {"batch_size": len(prompts), **self.settings}


def load(model: str, drafter: str | None, recipe: str | None, steps: int | None = None) -> Painter:
    """Load a pipeline and, where the recipe takes one, its draft pipeline."""
    from mmspec import recipes

    model = MODEL if model == given.MODEL else model
    recipe = recipe or RECIPE
    plan = recipes.get(recipe)
    if plan.decodes != "latents":
        raise ValueError(
            f"recipe {recipe!r} decodes {plan.decodes}; for pipelines there are "
            f"{', '.join(recipes.names('latents'))}"
        )
    if drafter is not None and not plan.takes_drafter:
        raise ValueError(f"recipe {recipe!r} takes no draft pipeline; drop --drafter")
    if drafter is None and plan.takes_drafter and model.startswith("zoo:"):
        drafter = given.default_drafter(model)
    pipe = load_pipeline(model)
    small = None if drafter is None else load_draft(pipe, drafter)
    return Painter(pipe, recipe, small, (model, drafter), _settings(pipe, model, steps))


def load_pipeline(name: str) -> Any:
    """A diffusers pipeline from a folder, a hub name or zoo:NAME; safetensors only."""
    from diffusers.utils import logging

    from mmspec.modalities.diffusion import loading

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    _present(name)
    pipe = loading.load_pipeline(name)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def parts(window: int | None, others: Mapping[str, Any]) -> dict[str, Any]:
    """`--window` beside the other parts typed, as `accelerate` takes them."""
    return dict(others) if window is None else {"window": window, **others}


def accelerated(painter: Painter, given_parts: Mapping[str, Any]) -> Any:
    """The pipeline under its recipe."""
    from mmspec.api import accelerate

    return accelerate(painter.pipe, painter.recipe, drafter=painter.drafter, **given_parts)


def load_draft(pipe: Any, name: str) -> Any:
    """A draft pipeline, silent."""
    from mmspec.modalities.diffusion import loading

    _present(name)
    small = loading.load_draft(pipe, name)
    small.set_progress_bar_config(disable=True)
    return small


def _present(name: str) -> None:
    """Refuse what the zoo has not got. Raises ValueError."""
    if not name.startswith("zoo:"):
        return
    from mmspec import zoo

    entry = zoo.info(name.removeprefix("zoo:"))
    if zoo.modality(entry.name).name != DIFFUSION:
        raise ValueError(f"{name} is no pipeline; give {MODEL}, or a folder of one")
    if not zoo.is_present(entry.name):
        raise ValueError(
            f"{name} is not there ({zoo.path(entry.name)}); train it with `mmspec zoo train "
            f"{entry.name}`"
        )


def _settings(pipe: Any, model: str, steps: int | None) -> dict[str, Any]:
    known = inspect.signature(pipe.__call__).parameters
    settings: dict[str, Any] = {name: value for name, value in AS_TYPED.items() if name in known}
    if model.startswith("zoo:"):
        from mmspec.modalities.diffusion.zoo.evaluate import WORDS_AT_MOST
        from mmspec.modalities.diffusion.zoo.models import GUIDANCE, STEPS

        settings |= {"max_sequence_length": WORDS_AT_MOST, "guidance_scale": GUIDANCE}
        steps = steps or STEPS
    if steps is not None:
        settings["num_inference_steps"] = steps
    return settings
