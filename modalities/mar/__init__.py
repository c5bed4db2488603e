"""Models that draw with continuous tokens."""

from mmspec.modalities.mar.settings import Settings
from mmspec.modality import Modality, Source


def owns(source: Source) -> bool:
    """Whether a model belongs here."""
    return source.model_type == "mar"


MODALITY = Modality(
    name="mar",
    decodes="patches",
    recipe="cspd-coupled",
    drafted=None,
    settings=Settings,
    plug="mmspec.modalities.mar.plug",
    measures="mmspec.modalities.mar.measures",
    owns=owns,
    parts=("length",),
    is_general=False,
)
