"""Text and vision-language models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mmspec.modalities.common import TOKEN_PLACEMENT
from mmspec.modality import Entry, Modality, Source, setting

# kinds of `mmspec.zoo.requests` beside "caption"
REQUEST_KINDS = ("short-question", "text", "chart", "reasoning", "conversation")


def owns(source: Source) -> bool:
    """Whether a source is a model of transformers, or a name that may be on a hub."""
    if source.model_type is not None or "PreTrainedModel" in source.classes:
        return True
    return isinstance(source.given, str | Path) and not source.classes


@dataclass(frozen=True)
class LanguageSettings:
    """Images and clips of the prompt, generation settings, and the examples of `mmspec bench`."""

    image: str | None = setting(None, "An image file, or zoo:scene.", reads="image")
    video: str | None = setting(
        None,
        "A video file, a folder of images, or zoo:clip.",
        reads="video",
        checkpoints=("video", "qwen2.5-vl"),
    )
    frames: int | None = setting(None, "Evenly spread frames of the video; default: 16.", min=1)
    fps: float | None = setting(None, "Frames of the video per second, instead of --frames.")
    max_new_tokens: int = setting(64, "Maximum number of new tokens.", min=1, max=1 << 16)
    temperature: float = setting(0.0, "0 is greedy.", min=0)
    json_schema: str | None = setting(
        None,
        "A file with the JSON schema that the output follows.",
        reads="schema",
        only="generate",
    )
    grammar: str | None = setting(
        None,
        "A file with the grammar that the output follows, in Lark's notation or GBNF.",
        reads="grammar",
        only="generate",
    )
    examples: str | None = setting(
        None,
        "Bundled examples: captions and questions of scenes, or requests of six kinds; default: "
        "those that the model is trained on.",
        choices=("scenes", "requests"),
        only="bench",
    )
    kind: str | None = setting(
        None,
        "Kind of bundled examples; default: all.",
        choices=("caption", "question", *REQUEST_KINDS),
        only="bench",
    )


MODALITY = Modality(
    name="vlm",
    decodes="tokens",
    recipe="prompt-lookup",
    recipe_with_drafter="coupled",
    recipe_of_checkpoint="native-mtp",
    example_prompt="describe the picture",
    settings=LanguageSettings,
    package=__name__,
    owns=owns,
    zoo=Entry.read_entries(__name__),
    placement=TOKEN_PLACEMENT,
    parts=("compressor", "kv", "tree", "length", "sees", "check", "compile"),
    is_general=True,
    offers=("image input",),
    survey="mmspec.modalities.vlm.survey",
    training_data="mmspec.modalities.vlm.training_data",
)
