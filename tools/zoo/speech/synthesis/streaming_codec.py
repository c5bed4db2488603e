"""The streaming codec of the bundled codec language models: a Mimi that decodes the codec's codes.

The X-codec 2 normalises over the whole utterance, so its speech sounds only at the end. This Mimi
(Defossez et al. 2024) decodes the same codes with a memory of 12 frames and a look-ahead of less
than two. It has no encoder, and only its first codebook is trained.

    python -m tools.zoo.speech.synthesis.streaming_codec mmspec/zoo/checkpoints/codec-lm
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from torch import Tensor
from torch.nn import functional
from transformers import MimiConfig, MimiModel

from mmspec.modalities.speech import CODEC
from mmspec.modalities.speech.codecs import DECODED_BOOKS, load_codec
from mmspec.training.fitting import CosineDecay, TrainingRun, fit
from tools.zoo.speech.synthesis.codec import HOP, LEVELS, RATE_HZ
from tools.zoo.speech.synthesis.codec_training import (
    FRAMES,
    CodecInput,
    extract_inputs,
    spectral_distance,
)
from tools.zoo.speech.synthesis.language_model_training import (
    SENTENCES,
    encode_codes,
    make_corpus,
)

STREAMING_CODEC = "streaming-codec"  # its folder beside the weights of a target
STAGES = (CosineDecay(1800, 1.5e-3), CosineDecay(1600, 1.2e-3), CosineDecay(1000, 1e-3))
_CROPS = 8
_WIDTH, _CODE_WIDTH = 128, 32


def build_streaming_codec() -> MimiModel:
    """An untrained decoder; the table of codes begins with their levels, projected at random.

    Transposed convolutions are trimmed on the left, so that each looks one step ahead: 1.6 frames.
    """
    build: Any = MimiConfig
    config = build(
        sampling_rate=RATE_HZ,
        frame_rate=RATE_HZ / HOP,
        upsampling_ratios=[8, 5, 4],
        upsample_groups=_WIDTH,
        hidden_size=_WIDTH,
        num_filters=16,
        num_residual_layers=1,
        trim_right_ratio=0.0,
        codebook_size=prod(LEVELS),
        codebook_dim=_CODE_WIDTH,
        vector_quantization_hidden_dimension=_CODE_WIDTH,
        num_quantizers=2,
        num_hidden_layers=2,
        intermediate_size=2 * _WIDTH,
        num_attention_heads=4,
        num_key_value_heads=4,
        sliding_window=8,
        layer_scale_initial_scale=0.1,
        encoder_config=None,
        **{DECODED_BOOKS: 1},
    )
    model = MimiModel(config)
    _initialize(model)
    return model


@dataclass(frozen=True)
class DecoderExample:
    """Codes and the speech they stand for."""

    codes: Tensor  # (..., F)
    waves: Tensor  # (..., F HOP)


def make_streaming_codec(
    inputs: Sequence[CodecInput], codes: Sequence[Sequence[int]], run: TrainingRun
) -> MimiModel:
    """Train a decoder of the codes of speech."""
    model = build_streaming_codec()
    pairs = zip(codes, inputs, strict=True)
    pool = [DecoderExample(torch.tensor(row), one.waves) for row, one in pairs]
    for number, schedule in enumerate(STAGES):
        examples = sample_examples(pool, _CROPS, run.seed + number)
        train_streaming_codec(model, examples, schedule, run)
    return model


def sample_examples(
    pool: Sequence[DecoderExample], batch: int, seed: int
) -> Iterator[DecoderExample]:
    """Endless batches of random crops of `FRAMES` frames; the first one begins an utterance."""
    generator = np.random.default_rng(seed)
    pool = [one for one in pool if len(one.codes) >= FRAMES]
    while True:
        codes, waves = [], []
        for index, number in enumerate(generator.integers(len(pool), size=batch)):
            one = pool[number]
            start = int(generator.integers(len(one.codes) - FRAMES + 1)) if index else 0
            stop = start + FRAMES
            codes.append(one.codes[start:stop])
            waves.append(one.waves[start * HOP : stop * HOP].float())
        yield DecoderExample(torch.stack(codes), torch.stack(waves))


def train_streaming_codec(
    model: MimiModel, examples: Iterator[DecoderExample], schedule: CosineDecay, run: TrainingRun
) -> None:
    """Train the decoder and its table of codes on spectral losses."""
    parts: Any = model
    quantizer = parts.quantizer.semantic_residual_vector_quantizer
    table, projection = quantizer.layers[0].codebook.embed_sum, quantizer.output_proj
    table.requires_grad_()
    model.train()

    def loss_of(batch: DecoderExample) -> Tensor:
        latents = projection(functional.embedding(batch.codes, table).transpose(1, 2))
        return spectral_distance(parts.decoder(latents).audio_values[:, 0], batch.waves)

    trained = [table, *projection.parameters(), *parts.decoder.parameters()]
    fit(trained, examples, loss_of, schedule, "streaming codec", run, betas=(0.8, 0.98))
    table.requires_grad_(False)
    model.train(False)


@torch.no_grad()
def _initialize(model: MimiModel) -> None:
    parts: Any = model
    codebook = parts.quantizer.semantic_residual_vector_quantizer.layers[0].codebook
    codes = torch.arange(prod(LEVELS))[:, None]
    below = torch.tensor([1, *np.cumprod(LEVELS[:-1])])
    levels = (codes // below % torch.tensor(LEVELS)) / torch.tensor(LEVELS) - 0.375
    spread = torch.randn(len(LEVELS), _CODE_WIDTH)
    codebook.embed_sum.copy_(2 * levels @ spread + 0.1 * torch.randn(len(codes), _CODE_WIDTH))


def main(folder: Path, steps: int | None = None, seed: int = 0) -> None:
    """Train the streaming codec of a target, on speech of espeak-ng, into its folder."""
    run = TrainingRun(seed, steps, print)
    torch.manual_seed(seed)
    codec = load_codec(folder / CODEC).model
    utterances = make_corpus(run.limit_steps(SENTENCES), progress=print)
    inputs = extract_inputs([one.waveform for one in utterances])
    codes = [encode_codes(codec, one) for one in inputs]
    made: Any = make_streaming_codec(inputs, codes, run)
    made.half().save_pretrained(folder / STREAMING_CODEC)


if __name__ == "__main__":
    typer.run(main)
