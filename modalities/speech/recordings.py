"""Bundled recordings of held-out sentences."""

from __future__ import annotations

import json
import wave
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mmspec.modalities.speech.sentences import sentence
from mmspec.modalities.speech.utterances import RATE_HZ, utterance
from mmspec.zoo.catalogue import FOLDER

RECORDINGS = FOLDER / "recordings"
COUNT = 13
_MIN_CHARACTERS = 28  # too few tokens to speculate on below
_FULL_SCALE = 1 << 15


@dataclass(frozen=True)
class Recording:
    """A WAV file of one held-out sentence (mono, 16 bit, `RATE_HZ`), and its text."""

    path: Path
    text: str

    def waveform(self) -> Tensor:  # -> (T,) in [-1, 1]
        with wave.open(str(self.path)) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
        return torch.from_numpy(samples / np.float32(_FULL_SCALE))


def recordings() -> tuple[Recording, ...]:
    """All bundled recordings, in a fixed order."""
    entries = json.loads((RECORDINGS / "recordings.json").read_text(encoding="utf-8"))
    return tuple(Recording(RECORDINGS / name, one["text"]) for name, one in entries.items())


def write_recordings(folder: Path = RECORDINGS) -> None:
    """Write the recordings and their index. Raises RuntimeError if espeak-ng is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = {}
    for seed in islice(_seeds(), COUNT):
        one = utterance(seed, "held-out")
        name = f"held-out-{seed:02}.wav"
        with wave.open(str(folder / name), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE_HZ)
            samples = (one.waveform * (_FULL_SCALE - 1)).round().numpy().astype("<i2")
            file.writeframes(samples.tobytes())
        entries[name] = {"text": one.text, "seed": seed, "voice": asdict(one.voice)}
    text = json.dumps(entries, indent=2) + "\n"
    (folder / "recordings.json").write_text(text, encoding="utf-8")


def _seeds() -> Iterator[int]:
    """Seeds of held-out sentences that are long enough, each sentence once."""
    seen: set[str] = set()
    for seed in count():
        text = sentence(seed, "held-out")
        if len(text) >= _MIN_CHARACTERS and text not in seen:
            seen.add(text)
            yield seed
