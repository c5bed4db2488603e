"""Train a codec to reconstruct speech: multi-scale spectral losses, without an adversary."""

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

from mmspec.training.fitting import CosineDecay, TrainingRun, fit
from tools.zoo.speech.synthesis.codec import HOP, RATE_HZ

FRAMES = 64  # of a crop
_SCALES = {2048: 160, 1024: 80, 512: 40, 256: 20, 128: 10}  # mels by samples of a window
_RELATIVE = (1024, 256)
_FLOOR = 1e-2  # smallest audible magnitude
_MEL_WINDOW, _MEL_HOP, _MELS = 400, 160, 80


@dataclass(frozen=True)
class CodecInput:
    """Speech as input of the codec, in frames."""

    waves: Tensor  # (..., F HOP)
    features: Tensor  # (..., F, 160)


def extract_inputs(waves: Sequence[Tensor]) -> list[CodecInput]:
    """Inputs of the codec, by its own feature extractor."""
    extract: Any = Xcodec2FeatureExtractor()
    found = []
    for wave in waves:
        inputs = extract(wave.numpy(), sampling_rate=RATE_HZ, return_tensors="pt")
        found.append(CodecInput(inputs["input_values"][0, 0], inputs["input_features"][0]))
    return found


def sample_crops(pool: Sequence[CodecInput], batch: int, seed: int) -> Iterator[CodecInput]:
    """Endless batches of random crops of `FRAMES` frames."""
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


def train_codec(
    model: Xcodec2Model, examples: Iterator[CodecInput], schedule: CosineDecay, run: TrainingRun
) -> None:
    """Train encoder, quantiser and decoder jointly, with straight-through gradients.

    The acoustic encoder branch stays zero: log-mel frames suffice, at a third of the cost.
    """
    _initialize(model, next(examples))
    parameters = [p for name, p in model.named_parameters() if "acoustic_encoder" not in name]
    model.train()

    def loss_of(batch: CodecInput) -> Tensor:
        return spectral_distance(reconstruct(model, batch), batch.waves)

    fit(parameters, examples, loss_of, schedule, "codec", run, betas=(0.8, 0.98))
    model.train(False)


@torch.no_grad()
def _initialize(model: Xcodec2Model, batch: CodecInput) -> None:
    """Initialise weights (Glorot & Bengio 2010), the code scale, and the mean spectrum."""
    parts: Any = model
    for layer in [one for one in model.modules() if isinstance(one, (nn.Linear, nn.Conv1d))]:
        nn.init.xavier_uniform_(layer.weight)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    for table in parts.acoustic_encoder.conv2.parameters():
        nn.init.zeros_(table)
    project_in = parts.quantizer.project_in
    project_in.weight /= project_in(encode(model, batch.features)).std()
    head = parts.acoustic_decoder.head
    bins = head.n_fft // 2 + 1
    head.linear.bias[:bins] = _log(_magnitudes(batch.waves, head.n_fft, HOP)).mean((0, 2))


def encode(model: Xcodec2Model, features: Tensor) -> Tensor:  # (B, F, 160) -> (B, F, D)
    """The latents before quantisation."""
    parts: Any = model
    seen = parts.semantic_encoder(features).last_hidden_state.transpose(1, 2)
    seen = parts.semantic_adapter(seen).transpose(1, 2)
    silent = seen.new_zeros(*seen.shape[:2], model.config.hidden_size)
    found: Tensor = parts.fc_encoder(torch.cat((seen, silent), -1))
    return found


def reconstruct(model: Xcodec2Model, batch: CodecInput) -> Tensor:  # (B, F HOP)
    """Speech through the codes, with gradients into the encoder."""
    parts: Any = model
    latents, _ = parts.quantizer(encode(model, batch.features))
    waves: Tensor = parts.acoustic_decoder(latents)[:, 0]
    return waves


def spectral_distance(decoded: Tensor, original: Tensor) -> Tensor:  # (B, L), (B, L) -> ()
    """Distance of log-mel spectra at each scale (Kumar et al. 2023), and of magnitudes."""
    total = decoded.new_zeros(())
    for window, mels in _SCALES.items():
        a, b = (_magnitudes(wave, window, window // 4) for wave in (decoded, original))
        bank = _mel_bank(window, mels)
        total = total + functional.l1_loss(_log(bank @ a), _log(bank @ b))
        if window in _RELATIVE:
            total = total + (a - b).norm() / b.norm()
    return total


def log_mel(waves: Tensor) -> Tensor:  # (B, L) -> (B, 80, T)
    """Natural logarithm of mel magnitudes, with windows of 25 ms every 10 ms."""
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
