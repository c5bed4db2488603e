"""What the zoo's speech models learn from: sentences of the Scene world in two voices."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from torch import Tensor

from mmspec.modalities.speech.zoo.sentences import sentence
from mmspec.modalities.speech.zoo.speaking import Room, Voice, utterance
from mmspec.training.reporting import Report, silent
from mmspec.zoo.scene import Split

SPEAKERS = {"paul": Voice("en-us"), "ada": Voice("en-us+f3")}
SENTENCES = 2400


@dataclass(frozen=True)
class CorpusUtterance:
    """A sentence, who says it, and (T,) how it sounds at 16 kHz."""

    text: str
    speaker: str
    waveform: Tensor


def corpus(
    sentences: int, split: Split = "train", progress: Report = silent
) -> list[CorpusUtterance]:
    """Different sentences, each in every voice. Raises RuntimeError where espeak-ng is missing."""
    found: list[CorpusUtterance] = []
    for number, seed in enumerate(seeds(sentences, split)):
        for speaker, voice in SPEAKERS.items():
            said = utterance(seed, split, voice, Room())
            found.append(CorpusUtterance(said.text, speaker, said.waveform))
        progress("speak", number + 1, sentences, 0.0)
    return found


def seeds(sentences: int, split: Split, first: int = 0) -> list[int]:
    """Seeds of so many different sentences, from the first seed on."""
    found: list[int] = []
    seen: set[str] = set()
    for seed in count(first):
        if len(found) == sentences:
            break
        text = sentence(seed, split)
        if text not in seen:
            seen.add(text)
            found.append(seed)
    return found
