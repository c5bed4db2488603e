"""Language models that speak: text in, codes of a codec out, one codebook in one vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mmspec.modalities.speech.voice_settings import VoiceSettings
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
class SpeechSettings(VoiceSettings):
    """Codes are drawn if nothing is said, because greedy speech tends to loop."""

    repetition_aware: bool = setting(
        False, "Codes that repeat are drawn anew from the whole distribution."
    )


MODALITY = Modality(
    name="tts",
    decodes="tokens",
    recipe="prompt-lookup",
    recipe_with_drafter="coupled",
    settings=SpeechSettings,
    package=__name__,
    owns=owns,
    zoo=Entry.read_entries(__name__),
    files=(".wav",),
    parts=("codec", "codes", "processor", "tree", "length", "sees", "check"),
)
