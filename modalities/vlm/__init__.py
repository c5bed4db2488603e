"""Text and vision-language models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mmspec.modality import Entry, Modality, Source, setting

_TRAINER = "mmspec.modalities.vlm.zoo.train"


def _trio(name: str, about: str, family: str, text: str) -> tuple[Entry, Entry, Entry]:
    """A target, a draft model that sees, and one that reads text alone."""
    seeing = f"{family} with one vision layer and one text layer; looks at the picture itself."
    blind = f"{text} of one layer with the tokenizer of its target; never sees the picture."
    drafter = f"{name}-drafter"
    return (
        Entry(name, f"{family}: {about}", _TRAINER, drafter=drafter, sees="pixels"),
        Entry(drafter, seeing, _TRAINER, target=name, sees="pixels"),
        Entry(f"{name}-text-drafter", blind, _TRAINER, target=name),
    )


ZOO = (
    *_trio(
        "llava", "CLIP vision tower of 3 layers, Llama text model of 24 layers.", "LLaVA", "Llama"
    ),
    *_trio(
        "qwen2.5-vl",
        "vision tower of 3 layers, text model of 24 layers, multimodal positions.",
        "Qwen2.5-VL",
        "Qwen2",
    ),
)


def owns(source: Source) -> bool:
    """Anything of transformers with a configuration, and any name that may be on a hub."""
    if source.model_type is not None or "PreTrainedModel" in source.classes:
        return True
    return isinstance(source.given, str | Path) and not source.classes


@dataclass(frozen=True)
class LanguageSettings:
    """A picture, how much to say and how freely; which examples of the zoo to measure on."""

    image: str | None = setting(None, "A picture file, or zoo:scene.")
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
    drafted="coupled",
    settings=LanguageSettings,
    package=__name__,
    owns=owns,
    zoo=ZOO,
    parts=("compressor", "kv", "tree", "length", "sees", "check"),
    is_general=True,
    survey="mmspec.modalities.vlm.survey",
)
