"""Models of several codebooks that speak or play: MusicGen (delay pattern), CSM (depth decoder)."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.modality import Modality, Source, setting

# what has frames; those of the second line are refused, and told why
READ = ("musicgen", "musicgen_melody", "csm")
REFUSED = ("dia", "moshi", "higgs_audio_v2")


def owns(source: Source) -> bool:
    """Families whose frames have several codes."""
    return source.model_type in (*READ, *REFUSED)


@dataclass(frozen=True)
class FrameModelSettings:
    """Who speaks, for how long, and how freely; the model's own way where nothing is said."""

    voice: str | None = setting(None, "A speaker by name, where the model has several.")
    max_new_tokens: int | None = setting(None, "Frames at most.", min=1)
    seconds: float | None = setting(None, "The same in seconds of sound.", min=0)
    temperature: float | None = setting(None, "0 is greedy.", min=0)
    top_k: int | None = setting(None, "Draw among the likeliest codes only.", min=1)
    top_p: float | None = setting(None, "Draw among the likeliest codes of this mass only.", min=0)
    guidance: float | None = setting(
        None, "Scale of guidance, where there is one; 1 = none.", min=1
    )
    rounds: str | None = setting(
        None,
        "A file for a spectrogram, coloured by the round each span was accepted in.",
        only="generate",
        writes=(".png",),
    )


MODALITY = Modality(
    name="frames",
    decodes="frames",
    recipe="frame-lookup",
    drafted="frame-coupled",
    settings=FrameModelSettings,
    package=__name__,
    owns=owns,
    files=(".wav",),
    parts=("processor", "length"),
    plain=("frame-plain", {}),
)
