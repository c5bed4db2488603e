"""The models that wrong calls are made of: tiny ones of every modality, and those of the zoo."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

import mmspec
from mmspec import recipes, zoo
from mmspec.zoo import language
from tests import toys
from tests.toys import controlnet_pipelines, embedded_pipelines, image_models, mar, pipelines
from tests.toys.texts import prompts, text

LESS = {"max_new_tokens": 3}


@dataclass(frozen=True)
class Subject:
    """One model, a request that it answers, and the parts it is accelerated with."""

    name: str
    decodes: str
    make: Callable[[], Any]
    request: Callable[[], Mapping[str, Any]]
    parts: Callable[[], Mapping[str, Any]] = dict
    call: str = "generate"
    stock: bool = True  # whether the library itself takes the same call

    @property
    def model(self) -> Any:
        return _build_model(self.name)

    @property
    def fast(self) -> mmspec.Accelerated:
        return _accelerated(self.name)

    def run(self, request: Mapping[str, Any]) -> Any:
        """Our answer."""
        return getattr(self.fast, self.call)(**request)

    def run_library(self, request: Mapping[str, Any]) -> Any:
        """Its own answer to the same."""
        with torch.no_grad():
            return getattr(self.model, self.call)(**request)


def _tokens(family: str) -> Subject:
    return Subject(
        family,
        "tokens",
        lambda: toys.model(family, layers=3),
        lambda: {**toys.inputs(family), **LESS},
    )


def _texts(name: str) -> Subject:
    return Subject(name, "tokens", lambda: text(name), lambda: {**prompts(1), **LESS})


def _painter(family: str) -> Subject:
    make, how = image_models.PAINTERS[family], {"guidance": 2.0}
    if family == "chameleon":
        how = {"guidance": 1.0}
    size = {} if family.startswith(("llamagen", "janus", "chameleon")) else {"grid": (2, 2)}
    return Subject(
        family,
        "tokens",
        make,
        lambda: {**image_models.request(family), **how, **size},
        call="generate_images",
        stock=False,
    )


def _pipeline(name: str, recipe: str) -> Subject:
    return Subject(
        f"{name} pipeline",
        "latents",
        lambda: pipelines.pipeline(name),
        lambda: {**pipelines.build_request(name), "num_inference_steps": 4, "output_type": "np"},
        lambda: {"recipe": recipe},
        call="__call__",
    )


def _controlled() -> Subject:
    def request() -> dict[str, Any]:
        _, given = controlnet_pipelines.build_pipeline("sd")
        return {**given, "num_inference_steps": 4, "output_type": "np"}

    return Subject(
        "ControlNet pipeline",
        "latents",
        lambda: controlnet_pipelines.build_pipeline("sd")[0],
        request,
        lambda: {"recipe": "asd"},
        call="__call__",
    )


def _experts() -> Subject:
    return Subject(
        "Wan pipeline",
        "latents",
        lambda: embedded_pipelines.build_pipeline("wan-2.2")[0],
        lambda: {**embedded_pipelines.build_pipeline("wan-2.2")[1], "num_inference_steps": 4},
        lambda: {"recipe": "asd"},
        call="__call__",
    )


def _drawing_mar() -> Subject:
    how = {"steps": 3, "head_steps": 3, "guidance": 2.0, "last_noise": True}
    return Subject(
        "tiny MAR",
        "patches",
        mar.mar,
        lambda: {"class_labels": [1], **how},
        lambda: {"drafter": mar.mar(1)},
        call="generate_images",
        stock=False,
    )


def _zoo_llava() -> Subject:
    def request() -> dict[str, Any]:
        processor, example = zoo.processor("llava"), language.examples(1, split="held-out")[0]
        prompt = language.format_prompt(processor, example.prompt)
        return {**processor(images=example.image, text=prompt, return_tensors="pt"), **LESS}

    return Subject("zoo:llava", "tokens", lambda: zoo.load("llava"), request)


def _zoo_image() -> Subject:
    return Subject(
        "zoo:image",
        "tokens",
        lambda: zoo.load("image"),
        lambda: {"prompt": "a red circle"},
        lambda: {"processor": zoo.processor("image")},
        call="generate_images",
        stock=False,
    )


SUBJECTS = {
    one.name: one
    for one in (
        *map(_tokens, ("llama", "gemma3-text", "llava", "qwen2_5_vl", "idefics3", "whisper")),
        _texts("gpt2"),
        *map(_painter, image_models.PAINTERS),
        _drawing_mar(),
        _pipeline("ddpm", "asd"),
        _pipeline("sd", "asd"),
        _pipeline("dit", "speca"),
        _controlled(),
        _experts(),
        _zoo_llava(),
        _zoo_image(),
    )
}


@cache
def _build_model(name: str) -> Any:
    return SUBJECTS[name].make()


@cache
def _accelerated(name: str) -> mmspec.Accelerated:
    subject = SUBJECTS[name]
    return mmspec.accelerate(subject.model, **subject.parts())


@cache
def drafter(subject: str, recipe: str) -> Any:
    """A draft model that fits; None where the recipe takes none."""
    plan = recipes.get(recipe)
    if not plan.takes_drafter:
        return None
    return SUBJECTS[subject].make()
