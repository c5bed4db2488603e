"""Between a person and a model that speaks: texts in, sounds and spectrograms out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.modalities.common import formatting
from mmspec.modalities.speech.spectrogram import spectrogram
from mmspec.modalities.speech.spoken import Speech


class SpeakingFormatter:
    """Asks one model to speak; `said` are arguments of every call, where they are not None."""

    def __init__(self, source: str, rounds: str | None, said: Mapping[str, Any]) -> None:
        self.source, self.rounds = source, rounds
        self.sampling = {name: value for name, value in said.items() if value is not None}

    def request(self, prompts: Sequence[str]) -> dict[str, Any]:
        """The texts, spoken by one voice."""
        return {"text": formatting.checked(prompts), **self.sampling}

    def text(self, output: Any) -> None:
        """Nothing is printed: what comes out is sound."""

    def data(self, output: Speech) -> dict[str, Any]:
        """The codes of each text, the round each frame came in, and how long it sounds."""
        return {
            "codes": [row.tolist() for row in output.codes],
            "rounds": [row.tolist() for row in output.rounds],
            "seconds": [len(row) / output.sampling_rate for row in output.waveforms],
            "sampling_rate": output.sampling_rate,
            "settings": self.sampling,
        }

    def render(self, output: Speech, path: Path) -> tuple[Path, ...]:
        """The sound, and a spectrogram where it is wanted."""
        written = [*output.save(path)]
        if self.rounds is not None:
            written.append(Path(self.rounds))
            shown = spectrogram(output.waveform, output.rounds[0], output.sampling_rate)
            shown.save(written[-1])
        return tuple(written)
