"""Models that draw with picture tokens."""

from mmspec.modalities.image.settings import Settings
from mmspec.modality import Modality, Source


def owns(source: Source) -> bool:
    """Whether a model belongs here."""
    return (
        source.model_type in ("emu3", "janus", "llamagen")
        or "ChameleonForImageGeneration" in source.classes
    )


MODALITY = Modality(
    name="image",
    decodes="tokens",
    recipe="sjd",
    drafted=None,
    settings=Settings,
    plug="mmspec.modalities.image.plug",
    measures="mmspec.modalities.image.measures",
    owns=owns,
    parts=("compressor", "tree", "length", "sees", "processor"),
    is_general=False,
)
