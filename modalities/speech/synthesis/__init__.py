"""Language models that speak: text in, codes of a codec out, one codebook in one vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mmspec.modality import Entry, Modality, Source, setting
from mmspec.models.folder import configuration

CODEC = "codec"  # the folder of the codec, beside the weights of the language model
LAYOUT = "speech_codes"  # the entry of its configuration: see `synthesis.layout.SpeechCodes`


def owns(source: Source) -> bool:
    """A language model whose configuration says where its codes of speech are."""
    if isinstance(source.given, str | Path):
        file = Path(source.given) / "config.json"
        says = file.is_file() and LAYOUT in configuration(file)
        return says or (Path(source.given) / CODEC / "config.json").is_file()
    config = vars(source.given).get("config") if hasattr(source.given, "__dict__") else None
    return LAYOUT in getattr(config, "__dict__", {})


@dataclass(frozen=True)
class SpeechSettings:
    """Who speaks, for how long, and how freely codes are drawn."""

    voice: str | None = setting(None, "A speaker by name; the model's first if not said.")
    max_new_tokens: int | None = setting(None, "Codes to speak at most.", min=1)
    seconds: float | None = setting(None, "The same in seconds of sound.", min=0)
    temperature: float = setting(1.0, "0 is greedy.", min=0)
    top_k: int | None = setting(None, "Draw among the likeliest codes only.", min=1)
    top_p: float | None = setting(None, "Draw among the likeliest codes of this mass only.", min=0)
    repetition_aware: bool = setting(False, "Codes that repeat are drawn anew from the whole law.")
    rounds: str | None = setting(
        None,
        "A file for a spectrogram, coloured by the round each span was accepted in.",
        only="generate",
        writes=(".png",),
    )


MODALITY = Modality(
    name="tts",
    decodes="tokens",
    recipe="prompt-lookup",
    drafted="coupled",
    settings=SpeechSettings,
    package=__name__,
    owns=owns,
    zoo=Entry.listed(__name__),
    files=(".wav",),
    parts=("codec", "codes", "processor", "tree", "length", "sees", "check"),
)
