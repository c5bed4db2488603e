"""Teach a codec to give back what it hears: spectra at several scales, and no adversary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Xcodec2FeatureExtractor, Xcodec2Model

from mmspec.training.fitting import Course, Fall, fit
from tools.zoo.speech.synthesis.codec import HOP, RATE_HZ

FRAMES = 64  # of a crop
_SCALES = {2048: 160, 1024: 80, 512: 40, 256: 20, 128: 10}  # mels by samples of a window
_RELATIVE = (1024, 256)
_FLOOR = 1e-2  # magnitude under which nothing is heard
_MEL_WINDOW, _MEL_HOP, _MELS = 400, 160, 80


@dataclass(frozen=True)
class CodecInput:
    """Speech as the codec reads it, by frames."""

    waves: Tensor  # (..., F HOP)
    features: Tensor  # (..., F, 160)


def heard(waves: Sequence[Tensor]) -> list[CodecInput]:
    """What the codec's own feature extractor makes of each."""
    extract: Any = Xcodec2FeatureExtractor()
    found = []
    for wave in waves:
        inputs = extract(wave.numpy(), sampling_rate=RATE_HZ, return_tensors="pt")
        found.append(CodecInput(inputs["input_values"][0, 0], inputs["input_features"][0]))
    return found


def crops(pool: Sequence[CodecInput], batch: int, seed: int) -> Iterator[CodecInput]:
    """Batches without end, each of `FRAMES` frames from somewhere in an utterance."""
    generator = np.random.default_rng(seed)
    pool = [one for one in pool if len(one.features) >= FRAMES]
    while True:
        waves, features = [], []
        for number in generator.integers(len(pool), size=batch):
            one = pool[number]
            start = int(generator.integers(len(one.features) - FRAMES + 1))
            stop = start + FRAMES
            waves.append(one.waves[start * HOP : stop * HOP])
            features.append(one.features[start:stop])
        yield CodecInput(torch.stack(waves), torch.stack(features))


def learn_codec(
    model: Xcodec2Model, taught: Iterator[CodecInput], fall: Fall, course: Course
) -> None:
    """Train encoder, quantiser and decoder together, straight through the rounding.

    The branch that reads samples is left silent: log-mel frames say enough, at a third of the cost.
    """
    _begin(model, next(taught))
    learnt = [p for name, p in model.named_parameters() if "acoustic_encoder" not in name]
    model.train()

    def loss_of(lesson: CodecInput) -> Tensor:
        return apart(rebuilt(model, lesson), lesson.waves)

    fit(learnt, taught, loss_of, fall, "codec", course, betas=(0.8, 0.98))
    model.train(False)


@torch.no_grad()
def _begin(model: Xcodec2Model, lesson: CodecInput) -> None:
    """Begin with signals of even size (Glorot & Bengio 2010), codes in use, and a mean spectrum."""
    parts: Any = model
    for layer in [one for one in model.modules() if isinstance(one, (nn.Linear, nn.Conv1d))]:
        nn.init.xavier_uniform_(layer.weight)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    for table in parts.acoustic_encoder.conv2.parameters():
        nn.init.zeros_(table)
    asked = parts.quantizer.project_in
    asked.weight /= asked(hidden(model, lesson.features)).std()
    head = parts.acoustic_decoder.head
    bins = head.n_fft // 2 + 1
    head.linear.bias[:bins] = _log(_magnitudes(lesson.waves, head.n_fft, HOP)).mean((0, 2))


def hidden(model: Xcodec2Model, features: Tensor) -> Tensor:  # (B, F, 160) -> (B, F, D)
    """What is quantised."""
    parts: Any = model
    seen = parts.semantic_encoder(features).last_hidden_state.transpose(1, 2)
    seen = parts.semantic_adapter(seen).transpose(1, 2)
    silent = seen.new_zeros(*seen.shape[:2], model.config.hidden_size)
    found: Tensor = parts.fc_encoder(torch.cat((seen, silent), -1))
    return found


def rebuilt(model: Xcodec2Model, lesson: CodecInput) -> Tensor:  # (B, F HOP)
    """Speech through the codes, with gradients into the encoder."""
    parts: Any = model
    latents, _ = parts.quantizer(hidden(model, lesson.features))
    waves: Tensor = parts.acoustic_decoder(latents)[:, 0]
    return waves


def apart(told: Tensor, wanted: Tensor) -> Tensor:  # (B, L), (B, L) -> ()
    """Distance of log-mel spectra at each scale (Kumar et al. 2023), and of magnitudes."""
    total = told.new_zeros(())
    for window, mels in _SCALES.items():
        a, b = (_magnitudes(wave, window, window // 4) for wave in (told, wanted))
        bank = _mel_bank(window, mels)
        total = total + functional.l1_loss(_log(bank @ a), _log(bank @ b))
        if window in _RELATIVE:
            total = total + (a - b).norm() / b.norm()
    return total


def log_mel(waves: Tensor) -> Tensor:  # (B, L) -> (B, 80, T)
    """Natural logarithm of mel magnitudes, as a recogniser hears them: 25 ms every 10 ms."""
    return _log(_mel_bank(_MEL_WINDOW, _MELS) @ _magnitudes(waves, _MEL_WINDOW, _MEL_HOP))


def _magnitudes(waves: Tensor, window: int, hop: int) -> Tensor:  # (B, L) -> (B, F, T)
    spectrum = torch.stft(waves, window, hop, window=torch.hann_window(window), return_complex=True)
    return (spectrum.real.square() + spectrum.imag.square() + 1e-9).sqrt()


def _log(values: Tensor) -> Tensor:
    return values.add(_FLOOR).log()


@cache
def _mel_bank(window: int, mels: int) -> Tensor:  # (mels, window / 2 + 1)
    from torchaudio.functional import melscale_fbanks

    bank: Tensor = melscale_fbanks(
        window // 2 + 1, 0.0, RATE_HZ / 2, mels, RATE_HZ, norm=None, mel_scale="htk"
    )
    return bank.T
