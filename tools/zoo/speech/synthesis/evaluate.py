"""Measure what speaks: words heard right by a recogniser, codec and all, and tokens per round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmspec.api import accelerate
from mmspec.modalities.speech.codecs import load_codec
from mmspec.modalities.speech.listening import listener, word_errors
from mmspec.modalities.speech.synthesis import CODEC
from mmspec.modalities.speech.synthesis.held_out import texts, voices
from tools.zoo.speech.synthesis.codec import RATE_HZ
from tools.zoo.speech.synthesis.codec_training import heard, log_mel
from tools.zoo.speech.synthesis.speaking import coded

AT_ONCE = 8


def spoken(fast: Any, count: int, seed: int = 0, **settings: Any) -> list[Any]:
    """What a model bound to a recipe says of held-out sentences, batch by batch."""
    said, who = texts(count), voices(count)
    return [
        fast.synthesize(
            said[at : at + AT_ONCE],
            voice=who[at : at + AT_ONCE],
            seed=seed,
            row_ids=list(range(at, min(at + AT_ONCE, count))),
            **settings,
        )
        for at in range(0, count, AT_ONCE)
    ]


def word_error_rate(wanted: Sequence[str], waveforms: Sequence[Tensor]) -> dict[str, float]:
    """By the zoo's recogniser, over all words; nothing where there is none."""
    ear, _ = listener()
    if ear is None:
        return {}
    found = word_errors(ear, wanted, waveforms, RATE_HZ)
    words = sum(weight for _, weight in found)
    return {"word_error_rate": round(sum(rate * weight for rate, weight in found) / words, 4)}


def speech_right(model: Any, count: int, **settings: Any) -> dict[str, float]:
    """Word errors of sampled speech."""
    outputs = spoken(accelerate(model, "plain"), count, **settings)
    waveforms = [waveform for one in outputs for waveform in one.waveforms]
    return word_error_rate(texts(count), waveforms)


def acceptance(target: Any, drafter: Any, length: int, count: int, **settings: Any) -> float:
    """Tokens per round of coupled chain speculation, sampled."""
    outputs = spoken(
        accelerate(target, "coupled", drafter=drafter, length=length), count, **settings
    )
    rounds = sum(one.stats.num_spec_steps for one in outputs)
    mean: float = sum(one.stats.num_new_tokens for one in outputs) / max(rounds, 1)
    return round(mean, 3)


@torch.no_grad()
def through_codec(folder: Path, waveforms: Sequence[Tensor]) -> tuple[list[Tensor], float]:
    """Waveforms as the codec gives them back, and the mean distance of log-mels, in nats."""
    codec = load_codec(folder / CODEC)
    made, apart = [], []
    for one in heard(waveforms):
        codes = torch.tensor(coded(codec.model, one))
        made.append(codec.decode(codes[None]))
        pair = (log_mel(wave[None]) for wave in (made[-1], one.waves))
        apart.append((next(pair) - next(pair)).abs().mean())
    return made, float(torch.stack(apart).mean())
