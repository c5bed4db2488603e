"""From what is typed to frames, and from frames to files: models of several codebooks."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForTextToWaveform

from mmspec.errors import reading
from mmspec.modalities.common import doctor, formatting
from mmspec.modalities.common.doctor import both
from mmspec.modalities.speech.formatting import SpeakingFormatter
from mmspec.modalities.speech.frames import FrameModelSettings
from mmspec.modalities.speech.frames.families import reader
from mmspec.modalities.speech.frames.plug import load, processor, session
from mmspec.modality import Finding

_SHOWN = ("rounds",)  # settings that are not the model's


class FrameFormatter(SpeakingFormatter):
    """Asks one model to speak or to play."""

    def __init__(
        self, source: str, model: Any, settings: FrameModelSettings, **options: Any
    ) -> None:
        said = {name: one for name, one in asdict(settings).items() if name not in _SHOWN}
        super().__init__(source, settings.rounds, said)
        self.processor = processor(formatting.origin(source, model))


formatter = FrameFormatter


def load_drafter(model: Any, source: str | Path, **options: Any) -> Any:
    """A smaller model of the same codebooks."""
    return load(source, **options)


def examine(target: str, drafter: str | None) -> list[Finding]:
    """What can be said of a model, or of a pair, without reading weights."""
    names = [name for name in (target, drafter) if name is not None]
    models = [_skeleton(name) for name in names]
    pairs = list(zip(names, models, strict=True))
    found = [
        both("weights", pairs, lambda one: doctor.weights(*one)),
        both("model", models, lambda model: type(model).__name__),
        both("frames", models, _frames),
        both("codebooks", models, lambda model: reader(model).books),
        both("codes of a book", models, lambda model: reader(model).size),
    ]
    if doctor.is_refused(found):
        return found
    small = models[1] if drafter is not None else None
    return [*found, *doctor.fitting("frames", session, models[0], small)]


def _skeleton(name: str) -> Any:
    with reading(name):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        return doctor.skeleton(lambda: AutoModelForTextToWaveform.from_config(config))


def _frames(model: Any) -> str:
    return "delay pattern" if reader(model).is_parallel else "depth decoder"
