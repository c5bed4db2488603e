"""Models that draw with continuous tokens."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.modality import PICTURE_FILES, Entry, Modality, Source, setting


def owns(source: Source) -> bool:
    """Models of the configuration `mmspec.models.mar.MarConfig`."""
    return source.model_type == "mar"


@dataclass(frozen=True)
class MarSettings:
    """How to draw, and what to show and to judge; the model's own way where nothing is said."""

    steps: int | None = setting(None, "Steps in which all tokens are drawn.", min=2)
    guidance: float | None = setting(None, "Scale of guidance; 1 = none.", min=0)
    guidance_schedule: str | None = setting(
        None, "How guidance grows over the steps.", choices=("linear", "constant")
    )
    temperature: float | None = setting(None, "Scale of the noise of the head.", min=0)
    head_steps: int | None = setting(None, "Steps of the head for each token.", min=2)
    last_noise: bool = setting(True, "Noise in the head's last step, which exact recipes need.")
    grid: str | None = setting(None, "A sheet of pictures, as in 4x4.", only="generate")
    pictures: int = setting(
        128, "How many the judge looks at; 0 = those that are timed.", min=0, only="bench"
    )


MODALITY = Modality(
    name="mar",
    decodes="patches",
    recipe="cspd-coupled",
    settings=MarSettings,
    package=__name__,
    owns=owns,
    zoo=Entry.read_entries(__name__),
    files=PICTURE_FILES,
    parts=("length",),
)
