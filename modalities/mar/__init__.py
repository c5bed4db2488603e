"""Models that draw with continuous tokens."""

from __future__ import annotations

from mmspec.modalities.mar.settings import MarSettings
from mmspec.modality import PICTURE_FILES, Entry, Modality, Source

_TRAINER = "mmspec.modalities.mar.zoo.train"
ZOO = (
    Entry(
        "mar",
        "MAR: 8 layers and a diffusion head of 8 blocks; draws continuous tokens of a class.",
        _TRAINER,
        drafter="mar-drafter",
        settings={"steps": 36, "guidance": 3.0, "head_steps": 16},
    ),
    Entry(
        "mar-drafter",
        "MAR of 2 layers and a head of 2 blocks; the tokens and classes of its target.",
        _TRAINER,
        target="mar",
    ),
)


def owns(source: Source) -> bool:
    """Models of the configuration `mmspec.models.mar.MarConfig`."""
    if source.checkpoint is not None:
        return source.checkpoint in {entry.name for entry in ZOO}
    return source.model_type == "mar"


MODALITY = Modality(
    name="mar",
    decodes="patches",
    recipe="cspd-coupled",
    settings=MarSettings,
    plug="mmspec.modalities.mar.plug",
    asking="mmspec.modalities.mar.asking",
    measures="mmspec.modalities.mar.measures",
    owns=owns,
    zoo=ZOO,
    files=PICTURE_FILES,
    parts=("length",),
)
