"""Requests from prompts, and WAV and spectrogram files from speech."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.modalities.common import formatting
from mmspec.modalities.speech.spectrogram import draw_spectrogram
from mmspec.modalities.speech.speech_loop import Speech


class SpeechOutputFormatter:
    """Requests to synthesize; `sampling` are arguments of every call, None = default."""

    def __init__(self, source: str, rounds: str | None, sampling: Mapping[str, Any]) -> None:
        self.source, self.rounds = source, rounds
        self.sampling = {name: value for name, value in sampling.items() if value is not None}

    def request(self, prompts: Sequence[str]) -> dict[str, Any]:
        """The texts, in the voice of the settings."""
        return {"text": formatting.check_prompts(prompts), **self.sampling}

    def text(self, output: Any) -> None:
        """None: the output is audio."""

    def data(self, output: Speech) -> dict[str, Any]:
        """Codes, rounds of the frames, and duration of each text."""
        return {
            "codes": [row.tolist() for row in output.codes],
            "rounds": [row.tolist() for row in output.rounds],
            "seconds": [len(row) / output.sampling_rate for row in output.waveforms],
            "sampling_rate": output.sampling_rate,
            "settings": self.sampling,
        }

    def render(self, output: Speech, path: Path) -> tuple[Path, ...]:
        """The waveform, and a spectrogram if the settings name a file."""
        written = [*output.save(path)]
        if self.rounds is not None:
            written.append(Path(self.rounds))
            picture = draw_spectrogram(output.waveform, output.rounds[0], output.sampling_rate)
            picture.save(written[-1])
        return tuple(written)
