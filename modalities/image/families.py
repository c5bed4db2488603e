"""Image models: who draws, and with what.

Other packages add theirs by entry points of the group "mmspec.drawing_models": the name is the
`model_type` of the configuration, and what it points to is a `DrawingModel`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mmspec.codes.image_family import ImageFamily
from mmspec.modalities.common import readers
from mmspec.modalities.image import chameleon, emu3, janus, llamagen, strangers
from mmspec.models.chameleon import ChameleonForImageGeneration
from mmspec.models.llamagen import LlamaGenForImageGeneration
from mmspec.targets.readers.backbone import Backbone
from mmspec.targets.readers.family import Family
from mmspec.targets.readers.guidance import Guided
from mmspec.targets.readers.reader import Reader


@dataclass(frozen=True)
class DrawingModel:
    """A sort of model that draws with picture tokens."""

    family: Family  # with an `image_family`
    reader: Callable[[Any], Reader] | None = None  # None: a `Backbone`, codes are of its vocabulary
    maker: Any = None  # the class that loads its weights, where transformers has none that draws
    other: str | None = None  # what models of this type that cannot draw should be loaded as

    def draws(self, model: Any) -> bool:
        """Whether a model of this type does."""
        return self.other is None or isinstance(model, self.maker)


_OWN: Mapping[str, DrawingModel] = {
    "emu3": DrawingModel(emu3.FAMILY),
    "janus": DrawingModel(janus.FAMILY, janus.reader),
    "llamagen": DrawingModel(llamagen.FAMILY, llamagen.reader, LlamaGenForImageGeneration),
    "chameleon": DrawingModel(
        chameleon.FAMILY,
        maker=ChameleonForImageGeneration,
        other="mmspec.models.chameleon.ChameleonForImageGeneration",
    ),
}


@lru_cache(maxsize=1)
def models() -> Mapping[str, DrawingModel]:
    """All sorts by `model_type`. Raises ValueError where two share one."""
    found = dict(_OWN)
    for point in strangers():
        if point.name in found:
            raise ValueError(
                f"there are two drawing models of type {point.name!r}; rename the one in "
                f"{point.value}"
            )
        found[point.name] = point.load()
    return found


def maker(model_type: str | None) -> Any:
    """The class that loads weights of a type; None where transformers knows it."""
    found = None if model_type is None else models().get(model_type)
    return None if found is None else found.maker


def reader(model: Any) -> Reader:
    """What reads a model that draws, guidance included; of one that does not, its usual reader."""
    found = models().get(model.config.model_type)
    if found is None or not found.draws(model):
        return readers.reader(model, {})
    make = found.reader
    guided = Guided(Backbone(model, found.family) if make is None else make(model))
    guided.reader_maker = reader
    return guided


def image_family(model: Any) -> ImageFamily:
    """How a model draws. Raises ValueError for one that speaks no picture tokens."""
    kind, name = model.config.model_type, type(model).__name__
    found = models().get(kind)
    if found is not None and not found.draws(model):
        raise ValueError(
            f"{name} rules picture tokens out and has no decoder; load the weights as {found.other}"
        )
    if found is None:
        raise ValueError(
            f"{name} ({kind}) speaks no picture tokens; models that draw: "
            f"{', '.join(sorted(models()))}"
        )
    assert found.family.image_family is not None
    return found.family.image_family(model)
