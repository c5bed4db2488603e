"""The supported image models.

Other packages add theirs through entry points of the group "mmspec.drawing_models": the name is the
`model_type` of the configuration, the object is a `DrawingModel`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mmspec.codes.image_family import ImageFamily
from mmspec.modalities.common import families
from mmspec.modalities.image import chameleon, emu3, janus, llamagen, read_entry_points
from mmspec.models.chameleon import ChameleonForImageGeneration
from mmspec.models.llamagen import LlamaGenForImageGeneration
from mmspec.targets.readers.backbone import Backbone
from mmspec.targets.readers.guidance import Guided
from mmspec.targets.readers.reader import Family, Reader


@dataclass(frozen=True)
class DrawingModel:
    """A model type that generates image tokens."""

    family: Family  # with an `image_family`
    reader: Callable[[Any], Reader] | None = None  # None: a `Backbone` whose vocabulary has codes
    maker: Any = None  # class that loads the weights, if transformers has none that generates
    other: str | None = None  # class to suggest for models of this type that cannot generate images

    def can_generate(self, model: Any) -> bool:
        """Whether this model can generate images."""
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
def image_models() -> Mapping[str, DrawingModel]:
    """All image models by `model_type`. Raises ValueError for duplicates."""
    found = dict(_OWN)
    for point in read_entry_points():
        if point.name in found:
            raise ValueError(
                f"there are two drawing models of type {point.name!r}; rename the one in "
                f"{point.value}"
            )
        found[point.name] = point.load()
    return found


def maker(model_type: str | None) -> Any:
    """The class that loads the weights of a type; None for classes of transformers."""
    found = None if model_type is None else image_models().get(model_type)
    return None if found is None else found.maker


def reader(model: Any) -> Reader:
    """The guided reader of an image model; the ordinary reader of any other model."""
    found = image_models().get(model.config.model_type)
    if found is None or not found.can_generate(model):
        return families.make_reader(model, {})
    make = found.reader
    guided = Guided(Backbone(model, found.family) if make is None else make(model))
    guided.reader_maker = reader
    return guided


def image_family(model: Any) -> ImageFamily:
    """The image family of a model. Raises ValueError for models without image tokens."""
    kind, name = model.config.model_type, type(model).__name__
    found = image_models().get(kind)
    if found is not None and not found.can_generate(model):
        raise ValueError(
            f"{name} suppresses image tokens and has no decoder; load the weights as {found.other}"
        )
    if found is None:
        raise ValueError(
            f"{name} ({kind}) generates no image tokens; models that do: "
            f"{', '.join(sorted(image_models()))}"
        )
    assert found.family.image_family is not None
    return found.family.image_family(model)
