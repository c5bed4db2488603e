"""Image models: who draws, and with what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mmspec.codes.image_family import ImageFamily
from mmspec.modalities import readers
from mmspec.modalities.image import chameleon, emu3, janus, llamagen
from mmspec.models.chameleon import ChameleonForImageGeneration
from mmspec.models.llamagen import LlamaGenForImageGeneration
from mmspec.targets.backbone import Backbone
from mmspec.targets.code_backbone import CodeBackbone
from mmspec.targets.family import Family
from mmspec.targets.guidance import Guided
from mmspec.targets.reader import Reader

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


def draws(model: Any) -> bool:
    """Whether a model speaks picture tokens."""
    kind = model.config.model_type
    return kind in FAMILIES and (kind != "chameleon" or chameleon.draws(model))


def reader(model: Any) -> Reader:
    """What reads a model that draws, guidance included; of one that does not, its usual reader."""
    kind = model.config.model_type
    if not draws(model):
        return readers.reader(model, {})
    made = _READERS.get(kind)
    guided = Guided(Backbone(model, FAMILIES[kind]) if made is None else made(model))
    guided.reader_maker = reader
    return guided


def image_family(model: Any) -> ImageFamily:
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
            f"{', '.join(sorted(FAMILIES))}"
        )
    make = FAMILIES[kind].image_family
    assert make is not None
    return make(model)
