"""Measure speech models: word error rates, codec distortion, and tokens per round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmspec.api import accelerate
from mmspec.modalities.speech import CODEC
from mmspec.modalities.speech.audio_quality import load_recogniser, word_errors
from mmspec.modalities.speech.codecs import load_codec
from mmspec.modalities.speech.sentences import held_out_sentences
from mmspec.modalities.speech.utterances import cycle_speakers
from tools.zoo.speech.synthesis.codec import RATE_HZ
from tools.zoo.speech.synthesis.codec_training import extract_inputs, log_mel
from tools.zoo.speech.synthesis.language_model_training import encode_codes

AT_ONCE = 8


def synthesize_held_out(fast: Any, count: int, seed: int = 0, **settings: Any) -> list[Any]:
    """Synthesize held-out sentences, batch by batch."""
    texts, voices = held_out_sentences(count), cycle_speakers(count)
    return [
        fast.synthesize(
            texts[at : at + AT_ONCE],
            voice=voices[at : at + AT_ONCE],
            seed=seed,
            row_ids=list(range(at, min(at + AT_ONCE, count))),
            **settings,
        )
        for at in range(0, count, AT_ONCE)
    ]


def word_error_rate(texts: Sequence[str], waveforms: Sequence[Tensor]) -> dict[str, float]:
    """The word error rate of the bundled recogniser; empty if there is none."""
    recogniser, _ = load_recogniser()
    if recogniser is None:
        return {}
    found = word_errors(recogniser, texts, waveforms, RATE_HZ)
    words = sum(weight for _, weight in found)
    return {"word_error_rate": round(sum(rate * weight for rate, weight in found) / words, 4)}


def speech_word_errors(fast: Any, count: int, **settings: Any) -> dict[str, float]:
    """The word error rate of sampled speech."""
    outputs = synthesize_held_out(fast, count, **settings)
    waveforms = [waveform for one in outputs for waveform in one.waveforms]
    return word_error_rate(held_out_sentences(count), waveforms)


def acceptance(target: Any, drafter: Any, length: int, count: int, **settings: Any) -> float:
    """Tokens per round of coupled chain speculation, sampled."""
    outputs = synthesize_held_out(
        accelerate(target, "coupled", drafter=drafter, length=length), count, **settings
    )
    rounds = sum(one.stats.num_spec_steps for one in outputs)
    mean: float = sum(one.stats.num_new_tokens for one in outputs) / max(rounds, 1)
    return round(mean, 3)


@torch.no_grad()
def reconstruct_speech(
    folder: Path, waveforms: Sequence[Tensor], decoder: str = CODEC
) -> tuple[list[Tensor], float]:
    """Encode waveforms, and decode them by a codec; also the mean log-mel distance in nats."""
    codec, decodes = load_codec(folder / CODEC), load_codec(folder / decoder)
    decoded, distances = [], []
    for one in extract_inputs(waveforms):
        codes = torch.tensor(encode_codes(codec.model, one))
        decoded.append(decodes.decode(codes[None]))
        pair = (log_mel(wave[None]) for wave in (decoded[-1], one.waves))
        distances.append((next(pair) - next(pair)).abs().mean())
    return decoded, float(torch.stack(distances).mean())
