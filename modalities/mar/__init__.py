"""Models that generate images as continuous tokens (MAR)."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.modality import PICTURE_FILES, Entry, Modality, Source, setting


def owns(source: Source) -> bool:
    """Models of the configuration `mmspec.models.mar.MarConfig`."""
    return source.model_type == "mar"


@dataclass(frozen=True)
class MarSettings:
    """Sampling, and what the commands write and score; defaults are the model's."""

    steps: int | None = setting(None, "Autoregressive steps for all tokens.", min=2)
    guidance: float | None = setting(None, "Scale of guidance; 1 = none.", min=0)
    guidance_schedule: str | None = setting(
        None, "Schedule of the guidance scale over the steps.", choices=("linear", "constant")
    )
    temperature: float | None = setting(None, "Scale of the noise of the head.", min=0)
    head_steps: int | None = setting(None, "Denoising steps of the head per token.", min=2)
    last_noise: bool = setting(True, "Noise in the head's last step, which exact recipes need.")
    grid: str | None = setting(None, "A grid of images, as in 4x4.", only="generate")
    pictures: int = setting(
        128,
        "Number of images that are scored; 0 = those that are timed.",
        min=0,
        max=100_000,
        only="bench",
    )


MODALITY = Modality(
    name="mar",
    decodes="patches",
    recipe="cspd-coupled",
    example_prompt="red circle",
    settings=MarSettings,
    package=__name__,
    owns=owns,
    zoo=Entry.read_entries(__name__),
    files=PICTURE_FILES,
    parts=("length",),
    placement=("device", "dtype"),
)
