"""Text and vision-language models."""

from mmspec.modalities.vlm.settings import Settings
from mmspec.modality import Modality, Source


def owns(source: Source) -> bool:
    """Whether a model belongs here."""
    return True


MODALITY = Modality(
    name="vlm",
    decodes="tokens",
    recipe="prompt-lookup",
    drafted="coupled",
    settings=Settings,
    plug="mmspec.modalities.vlm.plug",
    measures="mmspec.modalities.vlm.measures",
    owns=owns,
    parts=("compressor", "tree", "length", "sees"),
    is_general=True,
)
