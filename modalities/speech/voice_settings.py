"""What may be said to whoever speaks, wherever its codes come from."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.modality import setting


@dataclass(frozen=True)
class VoiceSettings:
    """Who speaks, for how long, and how freely; the model's own way where nothing is said."""

    voice: str | None = setting(None, "A speaker by name, where the model has several.")
    max_new_tokens: int | None = setting(None, "Codes or frames to speak at most.", min=1)
    seconds: float | None = setting(None, "The same in seconds of sound.", min=0)
    temperature: float | None = setting(None, "0 is greedy.", min=0)
    top_k: int | None = setting(None, "Draw among the likeliest codes only.", min=1)
    top_p: float | None = setting(None, "Draw among the likeliest codes of this mass only.", min=0)
    rounds: str | None = setting(
        None,
        "A file for a spectrogram, coloured by the round each span was accepted in.",
        only="generate",
        writes=(".png",),
    )
