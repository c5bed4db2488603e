"""Requests from command-line settings; output as text and spectrograms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mmspec.modalities.common import doctor_tokens, formatting
from mmspec.modalities.common.audio_inputs import window_seconds
from mmspec.modalities.common.sound import Sound, read
from mmspec.modalities.speech import RecognitionSettings
from mmspec.modalities.speech.recognition import inputs
from mmspec.modalities.speech.recognition.plug import load, make_reader, session
from mmspec.modalities.speech.recognition.whisper_generate import has_whisper_generate
from mmspec.modalities.speech.spectrogram import draw_spectrogram
from mmspec.modality import Finding


class RecognitionFormatter:
    """Requests to transcribe the recording of the settings."""

    def __init__(
        self, source: str, model: Any, settings: RecognitionSettings, **options: Any
    ) -> None:
        self.source, self.model, self.settings = source, model, settings
        self.sound = None if settings.audio is None else read(settings.audio)
        self.processor = formatting.load_processor(source, model, True, **options)

    @property
    def sampling(self) -> dict[str, Any]:
        """Arguments of every call."""
        settings, made = self.settings, dict[str, Any]()
        if has_whisper_generate(self.model):
            options = {"language": settings.language, "task": settings.task}
            made |= {name: value for name, value in options.items() if value is not None}
        elif settings.task is not None or settings.timestamps:
            raise ValueError(
                f"--task and --timestamps are options of Whisper, which {self.source} is not; "
                "drop them"
            )
        made["do_sample"] = settings.temperature > 0
        if settings.temperature > 0:
            made["temperature"] = settings.temperature
        return made

    def request(
        self, prompts: Sequence[str], sounds: Sequence[Sound] | None = None
    ) -> dict[str, Any]:
        """Input tensors, one recording per prompt, and sampling arguments.

        The default of `sounds` is the recording of the settings. Raises ValueError without one.
        """
        sounds = [self.audio] * len(prompts) if sounds is None else sounds
        prompt = next((one for one in prompts if one.strip()), None)
        is_whisper = has_whisper_generate(self.model)
        language = None if is_whisper else self.settings.language
        made = inputs.prepare_inputs(self.model, self.processor, sounds, prompt, language)
        window, is_timed = window_seconds(self.processor), self.settings.timestamps
        if is_whisper and inputs.needs_timestamps(self.model, sounds, window, is_timed):
            made["return_timestamps"] = True
        limit = self.settings.max_new_tokens
        length = inputs.default_length(self.model, sounds)
        if limit is not None:
            length = {"max_new_tokens": limit}
        return {**made, **self.sampling, **length}

    @property
    def audio(self) -> Sound:
        """The recording of the settings. Raises ValueError if there is none."""
        if self.sound is None:
            raise ValueError(f"{self.source} transcribes audio; give --audio a file")
        return self.sound

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode new tokens without special tokens."""
        return inputs.decode(self.processor, tokens)

    def text(self, output: Any) -> str:
        """The transcript of a single recording."""
        return self.decode(self._select_new_tokens(output))

    def data(self, output: Any) -> dict[str, Any]:
        """The new tokens of a single recording."""
        return {"tokens": self._select_new_tokens(output)}

    def render(self, output: Any, path: Path) -> tuple[Path, ...]:
        """The spectrogram, coloured by how many tokens the round of each accepted.

        Tokens are spread evenly over the recording, in the order of the transcript, since their
        times are not known. Raises ValueError for models other than Whisper.
        """
        if not has_whisper_generate(self.model):
            raise ValueError(
                f"--out renders the rounds of Whisper, which {self.source} is not; drop it"
            )
        turns = [turn for turn, count in enumerate(output.rounds) for _ in range(count)]
        sound = self.audio
        picture = draw_spectrogram(sound.samples, torch.tensor(turns), sound.rate_hz, "tokens")
        picture.save(path)
        return (path,)

    def _select_new_tokens(self, output: Any) -> list[int]:
        row: list[int] = output.sequences[0].tolist()
        return row if has_whisper_generate(self.model) else row[-output.stats.num_new_tokens :]


def load_drafter(model: Any, source: str | Path, **options: Any) -> Any:
    """Load a draft model or head. Raises ValueError for what is neither."""
    return formatting.load_drafter(model, source, load, make_reader, **options)


formatter = RecognitionFormatter


def examine(target: str, drafter: str | None) -> list[Finding]:
    """Findings about a model, or a pair, without reading weights."""
    return doctor_tokens.examine(target, drafter, session, make_reader)
