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
from tests.covering import exhaustive, limited
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
    "bundled, streams": lambda: load_codec(zoo.path("codec-lm") / "streaming-codec"),
    "whole utterance": lambda: load_codec(zoo.path("codec-lm") / "codec"),
}


def random_codes(codec: Codec) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(codec.size, (codec.books, FRAMES), generator=draw)


@pytest.mark.parametrize("name", limited(exhaustive(CODECS, [*CODECS][::2]), 2))
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


def test_the_bundled_streaming_codec_looks_less_than_two_frames_ahead() -> None:
    """And it decodes the codes of the other codec of its model, in as many samples."""
    streams, whole = CODECS["bundled, streams"](), CODECS["whole utterance"]()
    assert (streams.books, streams.size, streams.hop) == (whole.books, whole.size, whole.hop)
    assert streams.sampling_rate == whole.sampling_rate
    assert 0 < streams.lookahead < 2 * streams.hop
    assert streams.context == 12


def test_work_of_a_stream_is_linear_in_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = CODECS["short memory"]()
    pieces, work = 2, dict[int, int]()
    assert codec.context is not None
    codec.final_samples(1)  # measures the codec

    def count(self: Codec, given: Tensor) -> Tensor:
        work[frames] += given.shape[1]
        return torch.zeros(given.shape[1] * self.hop)

    monkeypatch.setattr(Codec, "decode", count)
    for frames in (50, 100, 200):
        work[frames], stream = 0, CodecStream(codec)
        codes = torch.arange(frames)[None] % codec.size
        for end in range(pieces, frames + 1, pieces):
            stream.extend(codes[:, :end], codec.final_samples(end))
    assert work[200] - work[100] == 2 * (work[100] - work[50])


def test_a_residual_codec_may_decode_its_first_codebooks_only() -> None:
    made = mimi()
    assert Codec.of(made).books == 4
    made.config.decoded_codebooks = 1
    try:
        codec = Codec.of(made)
        codes = random_codes(codec)
        assert codes.shape == (1, FRAMES)
        assert torch.equal(codec.decode(codes), made.decode(codes[None]).audio_values.flatten())
        made.config.decoded_codebooks = 5
        with pytest.raises(ValueError, match="decoded_codebooks=5 of a MimiModel must be 1 to 4"):
            Codec.of(made)
    finally:
        del made.config.decoded_codebooks
