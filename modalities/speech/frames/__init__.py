"""Models of several codebooks that speak or play: MusicGen (delay pattern), CSM (depth decoder)."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.modalities.speech.voice_settings import VoiceSettings
from mmspec.modality import Modality, Source, setting

# what has frames; those of the second line are refused, and told why
READ = ("musicgen", "musicgen_melody", "csm")
REFUSED = ("dia", "moshi", "higgs_audio_v2")


def owns(source: Source) -> bool:
    """Families whose frames have several codes, but not the language model in one (Moshi's)."""
    is_text = any(name.endswith("ForCausalLM") for name in source.classes)
    return source.model_type in (*READ, *REFUSED) and not is_text


@dataclass(frozen=True)
class FrameModelSettings(VoiceSettings):
    """What is not said is as in the model's generation configuration."""

    guidance: float | None = setting(
        None, "Scale of guidance, where there is one; 1 = none.", min=1
    )


MODALITY = Modality(
    name="frames",
    decodes="frames",
    recipe="frame-lookup",
    recipe_with_drafter="frame-coupled",
    settings=FrameModelSettings,
    package=__name__,
    owns=owns,
    files=(".wav",),
    parts=("processor", "length"),
    plain=("frame-plain", {}),
)
