"""Models that draw with picture tokens."""

from __future__ import annotations

from mmspec.modalities.image import drawing_models
from mmspec.modalities.image.settings import ImageSettings
from mmspec.modality import PICTURE_FILES, Entry, Modality, Source

_KINDS = ("emu3", "janus", "llamagen")
_DRAWS = "ChameleonForImageGeneration"  # transformers' own Chameleon only writes
_TRAINER = "mmspec.modalities.image.zoo.train"
ZOO = (
    Entry(
        "image",
        "Janus: Llama of 16 layers, VQ codes of 72 x 72 pictures; draws them from a prompt.",
        _TRAINER,
        drafter="image-drafter",
        settings={"guidance": 3.0},
    ),
    Entry(
        "image-drafter",
        "Janus with a Llama of one layer; the words, codes and pictures of its target.",
        _TRAINER,
        target="image",
    ),
    Entry(
        "image-head",
        "One layer that continues the states of its target, and draws with its head.",
        _TRAINER,
        target="image",
        sees="target-states",
    ),
    Entry(
        "image-sketch",
        "Janus with a Llama of 3 layers; small pictures of 3 x 3 codes, and how to enlarge them.",
        "mmspec.modalities.image.zoo.low_resolution",
        target="image",
    ),
)


def owns(source: Source) -> bool:
    """Families with picture tokens; Chameleon only in the class that draws."""
    if source.checkpoint is not None:
        return source.checkpoint in {entry.name for entry in ZOO}
    kinds = (*_KINDS, *(point.name for point in drawing_models.points()))
    return source.model_type in kinds or _DRAWS in source.classes


MODALITY = Modality(
    name="image",
    decodes="tokens",
    recipe="mc-sjd-gumbel",
    settings=ImageSettings,
    plug="mmspec.modalities.image.plug",
    asking="mmspec.modalities.image.asking",
    measures="mmspec.modalities.image.measures",
    owns=owns,
    zoo=ZOO,
    files=PICTURE_FILES,
    parts=("compressor", "tree", "length", "sees", "processor"),
)
