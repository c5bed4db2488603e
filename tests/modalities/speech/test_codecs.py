"""Streams of a codec: the samples of the whole decode, without decoding old frames again."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MimiConfig, MimiModel

from mmspec import zoo
from mmspec.modalities.speech.codecs import PROBE, Codec, CodecStream, load_codec
from mmspec.models.loading import random_model
from tests.toys import speech_models

FRAMES, PIECE = 150, 3


@cache
def mimi() -> Any:
    made: Any = MimiConfig
    config = made(
        hidden_size=16,
        num_filters=4,
        num_residual_layers=1,
        upsampling_ratios=[4, 2],
        codebook_size=32,
        codebook_dim=8,
        vector_quantization_hidden_dimension=8,
        num_quantizers=4,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=16,
        sampling_rate=1000,
        frame_rate=62.5,
        upsample_groups=16,
    )
    return random_model(lambda: MimiModel(config), 0)


CODECS: dict[str, Any] = {
    "short memory": lambda: Codec.of(mimi()),
    "looks ahead": lambda: Codec.of(speech_models.dac()),
    "long memory": lambda: Codec.of(speech_models.codec()),
    "whole utterance": lambda: load_codec(zoo.path("codec-lm") / "codec"),
}


def random_codes(codec: Codec) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(codec.size, (codec.books, FRAMES), generator=draw)


@pytest.mark.parametrize("name", CODECS)
def test_streamed_samples_are_those_of_the_whole_decode(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = CODECS[name]()
    codes, stream, decoded = random_codes(codec), CodecStream(codec), list[int]()
    whole = codec.decode(codes)
    assert (codec.context is None) == (name == "whole utterance")
    codec.final_samples(1)  # measures the codec
    decode = Codec.decode

    def count(self: Codec, given: Tensor) -> Tensor:
        decoded.append(given.shape[1])
        return decode(self, given)

    monkeypatch.setattr(Codec, "decode", count)
    for end in range(PIECE, FRAMES + 1, PIECE):
        before, final = stream.samples, codec.final_samples(end)
        stream.extend(codes[:, :end], final if end < FRAMES else len(whole))
        assert len(stream.samples) == (final if end < FRAMES else len(whole))
        torch.testing.assert_close(stream.samples[: len(before)], before, atol=1e-5, rtol=0)
    slack = 1e-4 * float(whole.abs().max())
    torch.testing.assert_close(stream.samples, whole, atol=slack, rtol=0)
    if name == "whole utterance":
        assert decoded == [FRAMES]  # once, when it ends
    elif codec.context is not None:
        most = codec.context + codec.lookahead // codec.hop + 2 * PIECE
        assert max(decoded) <= max(most, PROBE + most)
        assert max(decoded[-20:]) <= most
    assert torch.equal(stream.complete(codes), whole)
