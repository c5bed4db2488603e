"""From what is typed to features of a sound, and from tokens to words and a picture of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mmspec.modalities.common import doctor_tokens, formatting
from mmspec.modalities.speech.recognition import RecognitionSettings, hearing, own_generate
from mmspec.modalities.speech.recognition.families import reader
from mmspec.modalities.speech.recognition.plug import load, session
from mmspec.modalities.speech.sound import Sound, read
from mmspec.modalities.speech.spectrogram import spectrogram
from mmspec.modality import Finding


class RecogniserFormatter:
    """Asks one model what is said in the sound that the settings name."""

    def __init__(
        self, source: str, model: Any, settings: RecognitionSettings, **options: Any
    ) -> None:
        self.source, self.model, self.settings = source, model, settings
        self.sound = None if settings.audio is None else read(settings.audio)
        self.processor = formatting.processor(source, model, True, **options)

    @property
    def sampling(self) -> dict[str, Any]:
        """Arguments of every call."""
        settings, made = self.settings, dict[str, Any]()
        if own_generate.is_own(self.model):
            told = {"language": settings.language, "task": settings.task}
            made |= {name: value for name, value in told.items() if value is not None}
        elif settings.task is not None or settings.timestamps:
            raise ValueError(
                f"--task and --timestamps are Whisper's, and {self.source} is none; drop them"
            )
        made["do_sample"] = settings.temperature > 0
        if settings.temperature > 0:
            made["temperature"] = settings.temperature
        return made

    def request(
        self, prompts: Sequence[str], sounds: Sequence[Sound] | None = None
    ) -> dict[str, Any]:
        """Tensors of the sounds, one per prompt, and the sampling.

        `sounds` take the place of the one of the settings. Raises ValueError where there is none.
        """
        heard = [self.heard] * len(prompts) if sounds is None else sounds
        said = next((one for one in prompts if one.strip()), None)
        told = None if own_generate.is_own(self.model) else self.settings.language
        made = hearing.inputs(self.model, self.processor, heard, said, told)
        limit, is_timed = hearing.window(self.processor), self.settings.timestamps
        if own_generate.is_own(self.model) and hearing.times(self.model, heard, limit, is_timed):
            made["return_timestamps"] = True
        most = self.settings.max_new_tokens
        room = hearing.room(self.model, heard) if most is None else {"max_new_tokens": most}
        return {**made, **self.sampling, **room}

    @property
    def heard(self) -> Sound:
        """The sound of the settings. Raises ValueError where there is none."""
        if self.sound is None:
            raise ValueError(f"{self.source} writes what it hears; give --audio a sound file")
        return self.sound

    def words(self, tokens: Sequence[int]) -> str:
        """New tokens as text, without marks of language, task or time."""
        return hearing.words(self.processor, tokens)

    def text(self, output: Any) -> str:
        """What was said in a single sound."""
        return self.words(self._answer(output))

    def data(self, output: Any) -> dict[str, Any]:
        """The new tokens of a single sound."""
        return {"tokens": self._answer(output)}

    def render(self, output: Any, path: Path) -> tuple[Path, ...]:
        """The spectrogram, in the colour of the round that brought each part of the transcript.

        Tokens are spread evenly over the sound, in the order they were written: where in it they
        were heard is not known. Raises ValueError for others than Whisper, of which no rounds are
        noted.
        """
        if not own_generate.is_own(self.model):
            raise ValueError(
                f"--out draws the rounds of Whisper, and {self.source} is none; drop it"
            )
        turns = [turn for turn, count in enumerate(output.rounds) for _ in range(count)]
        sound = self.heard
        picture = spectrogram(sound.samples, torch.tensor(turns), sound.rate_hz, "tokens")
        picture.save(path)
        return (path,)

    def _answer(self, output: Any) -> list[int]:
        row: list[int] = output.sequences[0].tolist()
        return row if own_generate.is_own(self.model) else row[-output.stats.num_new_tokens :]


def load_drafter(model: Any, source: str | Path, **options: Any) -> Any:
    """A draft model or head for a model. Raises ValueError for what is neither."""
    return formatting.load_drafter(model, source, load, **options)


formatter = RecogniserFormatter


def examine(target: str, drafter: str | None) -> list[Finding]:
    """What can be said of a model, or of a pair, without reading weights."""
    return doctor_tokens.examine(target, drafter, session, reader)
