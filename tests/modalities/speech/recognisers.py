"""A small Whisper with languages, tasks and marks of time, its processor, and sounds."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from mmspec.models.loading import random_model

RATE_HZ = 16000
SECONDS, STEP = 2, 0.02  # of a window; between marks of time
LETTERS = "abcdefghijklmnopqrstuvwxyz"
MARKS = ("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>")
MORE = ("<|transcribe|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>")
TIMES = tuple(f"<|{at * STEP:.2f}|>" for at in range(int(SECONDS / STEP) + 1))


@cache
def tokenizer() -> Any:
    words = {letter: at for at, letter in enumerate(LETTERS)}
    made = hf.WhisperTokenizer(vocab={**words, "<|endoftext|>": len(words)}, merges=[])
    made.add_tokens([hf.AddedToken(one, special=True) for one in (*MARKS, *MORE)])
    made.add_tokens([hf.AddedToken(one, special=False) for one in TIMES])
    return made


@cache
def processor() -> Any:
    extractor = hf.WhisperFeatureExtractor(
        feature_size=16, sampling_rate=RATE_HZ, chunk_length=SECONDS
    )
    return hf.WhisperProcessor(extractor, tokenizer())


def whisper(seed: int = 0, layers: int = 2) -> Any:
    """Random, so that it writes letters and marks of time as they come."""
    ids = tokenizer().convert_tokens_to_ids
    config = hf.WhisperConfig(
        vocab_size=len(tokenizer()),
        d_model=32,
        encoder_layers=1,
        decoder_layers=layers,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=16,
        max_source_positions=SECONDS * 50,
        max_target_positions=64,
        pad_token_id=ids("<|endoftext|>"),
        bos_token_id=ids("<|endoftext|>"),
        eos_token_id=ids("<|endoftext|>"),
        decoder_start_token_id=ids("<|startoftranscript|>"),
        suppress_tokens=None,
        begin_suppress_tokens=None,
        tie_word_embeddings=False,
    )
    model = random_model(lambda: hf.WhisperForConditionalGeneration(config), seed)
    own = model.generation_config
    own._from_model_config = False  # a saved one is read as it is
    own.max_length, own.is_multilingual = 20, True
    own.suppress_tokens = ids([*MARKS[1:], *MORE[:3]])
    own.begin_suppress_tokens = ids(["<|endoftext|>"])
    own.lang_to_id = {name: ids(name) for name in ("<|en|>", "<|de|>")}
    own.task_to_id = {name: ids(f"<|{name}|>") for name in ("translate", "transcribe")}
    own.no_timestamps_token_id = ids("<|notimestamps|>")
    own.prev_sot_token_id = ids("<|startofprev|>")
    own.max_initial_timestamp_index = 20
    return model


def noise(seconds: float, seed: int = 0, rate_hz: int = RATE_HZ) -> Tensor:
    """Something to hear."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(int(seconds * rate_hz), generator=generator).clamp(-3, 3) / 4
