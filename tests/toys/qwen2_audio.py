"""A tiny Qwen2-Audio of the real class, with its processor, in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2AudioConfig,
    Qwen2AudioEncoderConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    Qwen2Config,
    WhisperFeatureExtractor,
)

from mmspec.models.loading import random_model

SECONDS, BANDS = 2, 8
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:?\n"
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<pad>")


def make_tokenizer(special: Sequence[str], fill: int = 0, **more: Any) -> Any:
    """One token per letter, others up to the id `fill`, then special ones."""
    words = [*LETTERS, *(f"unused{at}" for at in range(len(LETTERS), fill))]
    core = Tokenizer(models.BPE(vocab={one: at for at, one in enumerate(words)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(one, special=True) for one in special])
    more |= {"pad_token": "<pad>", "eos_token": "<|im_end|>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, **more)


def tokenizer() -> Any:
    return make_tokenizer(SPECIAL)


def processor() -> Any:
    extractor = WhisperFeatureExtractor(feature_size=BANDS, chunk_length=SECONDS)
    return Qwen2AudioProcessor(extractor, tokenizer())


def model(seed: int = 0) -> Any:
    ids = tokenizer().convert_tokens_to_ids
    config = Qwen2AudioConfig(
        audio_config=Qwen2AudioEncoderConfig(
            num_mel_bins=BANDS,
            d_model=16,
            encoder_layers=1,
            encoder_attention_heads=2,
            encoder_ffn_dim=32,
            max_source_positions=SECONDS * 50,
        ),
        text_config=Qwen2Config(
            vocab_size=len(tokenizer()),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
        ),
        audio_token_index=ids("<|AUDIO|>"),
    )
    made = random_model(lambda: Qwen2AudioForConditionalGeneration(config), seed)
    made.generation_config.eos_token_id = ids("<|im_end|>")
    made.generation_config.pad_token_id = ids("<pad>")
    return made


def save(folder: Path, seed: int = 0) -> Path:
    """Write the model and its processor."""
    model(seed).save_pretrained(folder)
    processor().save_pretrained(folder)
    return folder
