"""Text and vision-language models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mmspec.modality import Entry, Modality, Source, setting


def owns(source: Source) -> bool:
    """Anything of transformers with a configuration, and any name that may be on a hub."""
    if source.model_type is not None or "PreTrainedModel" in source.classes:
        return True
    return isinstance(source.given, str | Path) and not source.classes


@dataclass(frozen=True)
class LanguageSettings:
    """Pictures, how much to say and how freely; which examples of the zoo to measure on.

    A clip is a way to ask: the same model reads pictures, clips and both, so it has one owner.
    """

    image: str | None = setting(None, "A picture file, or zoo:scene.")
    video: str | None = setting(None, "A video file, a folder of pictures, or zoo:clip.")
    frames: int | None = setting(None, "Frames of the video, evenly spread; 16 if not said.", min=1)
    fps: float | None = setting(None, "Frames of the video a second, in the place of --frames.")
    max_new_tokens: int = setting(64, "Tokens to write at most.", min=1)
    temperature: float = setting(0.0, "0 is greedy.", min=0)
    kind: str | None = setting(
        None,
        "Of the zoo's examples; both if not said.",
        choices=("caption", "question"),
        only="bench",
    )


MODALITY = Modality(
    name="vlm",
    decodes="tokens",
    recipe="prompt-lookup",
    recipe_with_drafter="coupled",
    settings=LanguageSettings,
    package=__name__,
    owns=owns,
    zoo=Entry.read_entries(__name__),
    parts=("compressor", "kv", "tree", "length", "sees", "check"),
    is_general=True,
    survey="mmspec.modalities.vlm.survey",
    training_data="mmspec.modalities.vlm.training_data",
)
