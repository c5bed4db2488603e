"""Text and vision-language models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mmspec.modality import Entry, Modality, Source, setting

_TRAINER = "mmspec.modalities.vlm.zoo.train"
ZOO = (
    Entry(
        "llava",
        "LLaVA: CLIP vision tower of 3 layers, Llama text model of 24 layers.",
        _TRAINER,
        drafter="llava-drafter",
        sees="pixels",
    ),
    Entry(
        "llava-drafter",
        "LLaVA with one vision layer and one text layer; looks at the picture itself.",
        _TRAINER,
        target="llava",
        sees="pixels",
    ),
    Entry(
        "llava-text-drafter",
        "Llama of one layer with the tokenizer of its target; never sees the picture.",
        _TRAINER,
        target="llava",
    ),
    Entry(
        "qwen2.5-vl",
        "Qwen2.5-VL: vision tower of 3 layers, text model of 24 layers, multimodal positions.",
        _TRAINER,
        drafter="qwen2.5-vl-drafter",
        sees="pixels",
    ),
    Entry(
        "qwen2.5-vl-drafter",
        "Qwen2.5-VL with one vision layer and one text layer; looks at the picture itself.",
        _TRAINER,
        target="qwen2.5-vl",
        sees="pixels",
    ),
    Entry(
        "qwen2.5-vl-text-drafter",
        "Qwen2 of one layer with the tokenizer of its target; never sees the picture.",
        _TRAINER,
        target="qwen2.5-vl",
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
    parts=("compressor", "tree", "length", "sees"),
    is_general=True,
)
