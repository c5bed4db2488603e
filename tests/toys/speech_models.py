"""A tiny language model with two voices, its tokenizer and its codec."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from transformers import DacConfig, DacModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import mmspec
from mmspec.modalities.speech.synthesis.layout import SpeechCodes
from mmspec.modalities.speech.synthesis.tiny_models import tiny_codec
from mmspec.models.loading import random_model

WORDS = ("[PAD]", "[UNK]", "a", "red", "circle", "blue", "square", "left")
SIZE = 8  # codes
LAYOUT = SpeechCodes(first=12, count=SIZE, begin=10, end=11, voices={"anna": 8, "ben": 9})
TEXTS = ["a red circle", "a blue square left"]
PLACES = 64


@cache
def speaker(seed: int = 0, layers: int = 2) -> Any:
    """A Llama whose configuration says where its codes are."""
    made: Any = LlamaConfig  # takes what it does not declare
    config = made(
        vocab_size=LAYOUT.first + SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=PLACES,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=LAYOUT.end,
        tie_word_embeddings=False,
        speech_codes={**vars(LAYOUT), "voices": dict(LAYOUT.voices)},
    )
    return random_model(lambda: LlamaForCausalLM(config), seed)


@cache
def codec(books: int = 1, size: int = SIZE) -> Any:
    return tiny_codec(books, size)


@cache
def dac() -> Any:
    """A codec that looks ahead."""
    made: Any = DacConfig
    config = made(
        encoder_hidden_size=4,
        downsampling_ratios=[2, 2],
        decoder_hidden_size=16,
        n_codebooks=1,
        codebook_size=SIZE,
        codebook_dim=4,
        upsampling_ratios=[2, 2],
        sampling_rate=1000,
        hidden_size=8,
    )
    return random_model(lambda: DacModel(config), 0)


@cache
def words() -> Any:
    """A tokenizer of whole words."""
    model = tokenizers.models.WordLevel({word: at for at, word in enumerate(WORDS)}, "[UNK]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")


def accelerated_speaker(recipe: str = "plain", **parts: Any) -> mmspec.Accelerated:
    """The model under a recipe; a drafter that is right in part where it takes one."""
    given = {"codec": codec(), "processor": words(), **parts}
    if recipe == "coupled":
        given.setdefault("drafter", speaker(seed=1, layers=1))
    return mmspec.accelerate(speaker(), recipe, **given)


def save_checkpoint(folder: Path) -> Path:
    """All of it in a folder, as a checkpoint of the zoo has it."""
    speaker().save_pretrained(folder)
    words().save_pretrained(folder)
    codec().save_pretrained(folder / "codec")
    return folder
