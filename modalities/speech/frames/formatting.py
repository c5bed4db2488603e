"""Requests from prompts, and files from frames, for models of several codebooks."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from mmspec.errors import explain_load_errors
from mmspec.modalities.common import doctor, formatting
from mmspec.modalities.common.doctor import check_models
from mmspec.modalities.speech import FrameModelSettings
from mmspec.modalities.speech.formatting import SpeechOutputFormatter
from mmspec.modalities.speech.frames.plug import (
    auto_class,
    load,
    make_reader,
    processor,
    session,
)
from mmspec.modality import Finding

_OUTPUT_SETTINGS = ("rounds",)  # not arguments of the model


class FrameFormatter(SpeechOutputFormatter):
    """Requests to synthesize frames."""

    def __init__(
        self, source: str, model: Any, settings: FrameModelSettings, **options: Any
    ) -> None:
        given = asdict(settings).items()
        sampling = {name: one for name, one in given if name not in _OUTPUT_SETTINGS}
        super().__init__(source, settings.rounds, sampling)
        self.processor = processor(formatting.get_source(source, model))


formatter = FrameFormatter


def load_drafter(model: Any, source: str | Path, **options: Any) -> Any:
    """Load a smaller model of the same codebooks."""
    return load(source, **options)


def examine(target: str, drafter: str | None) -> list[Finding]:
    """Findings about a model, or a pair, without reading weights."""
    names = [name for name in (target, drafter) if name is not None]
    models = [_skeleton(name) for name in names]
    pairs = list(zip(names, models, strict=True))
    found = [
        check_models("weights", pairs, lambda one: doctor.check_weights(*one)),
        check_models("model", models, lambda model: type(model).__name__),
        check_models("frames", models, _frames),
        check_models("codebooks", models, lambda model: make_reader(model).books),
        check_models("codes of a book", models, lambda model: make_reader(model).size),
    ]
    if doctor.is_refused(found):
        return found
    small = models[1] if drafter is not None else None
    return [*found, *doctor.find_fitting_recipes(session, models[0], small)]


def _skeleton(name: str) -> Any:
    with explain_load_errors(name):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        maker = auto_class(config.model_type)
        return doctor.skeleton(lambda: maker.from_config(config))


def _frames(model: Any) -> str:
    return "delay pattern" if make_reader(model).is_parallel else "depth decoder"
