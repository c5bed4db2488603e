"""Text and vision-language models."""

from __future__ import annotations

from pathlib import Path

from mmspec.modalities.vlm.settings import LanguageSettings
from mmspec.modality import Entry, Modality, Source

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
    if source.checkpoint is not None:
        return source.checkpoint in {entry.name for entry in ZOO}
    if source.model_type is not None or "PreTrainedModel" in source.classes:
        return True
    return isinstance(source.given, str | Path) and not source.classes


MODALITY = Modality(
    name="vlm",
    decodes="tokens",
    recipe="prompt-lookup",
    drafted="coupled",
    settings=LanguageSettings,
    plug="mmspec.modalities.vlm.plug",
    asking="mmspec.modalities.vlm.asking",
    measures="mmspec.modalities.vlm.measures",
    owns=owns,
    zoo=ZOO,
    parts=("compressor", "tree", "length", "sees", "check"),
    is_general=True,
    survey="mmspec.modalities.vlm.survey",
)
