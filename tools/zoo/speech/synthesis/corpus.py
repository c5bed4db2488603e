"""What the zoo's speech models learn from: sentences of the Scene world in two voices."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmspec.modalities.speech.synthesis.held_out import SPEAKERS, seeds
from mmspec.modalities.speech.utterances import Room, utterance
from mmspec.training.reporting import Report, silent
from mmspec.zoo.scene import Split

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
