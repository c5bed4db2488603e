"""Image models: who draws, and with what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mmspec.backbone import Backbone, Family
from mmspec.codes import CodeBackbone
from mmspec.guidance import Guided
from mmspec.images import Painter
from mmspec.modalities import chameleon, emu3, janus, llamagen
from mmspec.models.chameleon import ChameleonForImageGeneration
from mmspec.models.llamagen import LlamaGenForImageGeneration

FAMILIES: Mapping[str, Family] = {
    "emu3": emu3.FAMILY,
    "janus": janus.FAMILY,
    "llamagen": llamagen.FAMILY,
    "chameleon": chameleon.FAMILY,
}
CLASSES: Mapping[str, Any] = {  # of weights that transformers does not load as what draws
    "llamagen": LlamaGenForImageGeneration,
    "chameleon": ChameleonForImageGeneration,
}
_READERS: Mapping[str, Callable[[Any], CodeBackbone]] = {
    "janus": janus.reader,
    "llamagen": llamagen.reader,
}
_PAINTERS: Mapping[str, Callable[[Any], Painter]] = {
    "emu3": emu3.painter,
    "janus": janus.painter,
    "llamagen": llamagen.painter,
    "chameleon": chameleon.painter,
}


def draws(model: Any) -> bool:
    """Whether a model speaks picture tokens."""
    kind = model.config.model_type
    return kind in FAMILIES and (kind != "chameleon" or chameleon.draws(model))


def backbone(model: Any) -> Guided:
    """The backbone of a model that draws."""
    kind = model.config.model_type
    reader = _READERS.get(kind)
    return Guided(Backbone(model, FAMILIES[kind]) if reader is None else reader(model))


def painter(model: Any) -> Painter:
    """How a model draws. Raises ValueError for one that speaks no picture tokens."""
    kind = model.config.model_type
    if kind == "chameleon" and not draws(model):
        raise ValueError(
            f"{type(model).__name__} rules picture tokens out and has no decoder; load the weights "
            "as mmspec.models.chameleon.ChameleonForImageGeneration"
        )
    if not draws(model):
        raise ValueError(
            f"{type(model).__name__} ({kind}) speaks no picture tokens; models that draw: "
            f"{', '.join(sorted(_PAINTERS))}"
        )
    return _PAINTERS[kind](model)
