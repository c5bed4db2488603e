"""A tiny Granite-Speech of the real class, with a tokenizer of characters and sounds to hear."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    Blip2QFormerConfig,
    GraniteConfig,
    GraniteSpeechConfig,
    GraniteSpeechEncoderConfig,
    GraniteSpeechForConditionalGeneration,
    PreTrainedTokenizerFast,
)

WINDOW, MADE = 4, 2  # frames of a window, and what the projector makes of them
PAD, END, AUDIO, ASK = 0, 1, 2, 3
LETTERS = "abcdefghij "
SIZE = 4 + len(LETTERS)
SCALING = 4.0


@lru_cache(maxsize=1)
def tokenizer() -> Any:
    """One token per letter, behind four that are none."""
    words = ["<pad>", "<end>", "<audio>", "<ask>", *LETTERS]
    core = Tokenizer(models.BPE(vocab={word: at for at, word in enumerate(words)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<end>")


@lru_cache(maxsize=4)
def model(labels: int = 128, sharp: float = 12.0) -> Any:
    """`labels` of the CTC head: code points, or one more than tokens (see `SIZE`).

    `sharp` multiplies the head of the language model, so that some of its distributions are sure.
    """
    config = GraniteSpeechConfig(
        text_config=GraniteConfig(
            vocab_size=SIZE,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            logits_scaling=SCALING,
            initializer_range=0.3,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=END,
            pad_token_id=PAD,
        ),
        encoder_config=GraniteSpeechEncoderConfig(
            input_dim=6,
            hidden_dim=16,
            num_layers=2,
            num_heads=2,
            output_dim=labels,
            context_size=8,
            max_pos_emb=8,
            conv_kernel_size=3,
            dropout=0.0,
        ),
        projector_config=Blip2QFormerConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            encoder_hidden_size=16,
            cross_attention_frequency=1,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        audio_token_index=AUDIO,
        has_lora_adapter=False,
        window_size=WINDOW,
        downsample_rate=WINDOW // MADE,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    made = GraniteSpeechForConditionalGeneration(config).eval()
    made.generation_config.eos_token_id, made.generation_config.pad_token_id = END, PAD
    with torch.no_grad():
        made.lm_head.weight.mul_(sharp)
        out = made.model.encoder.out
        out.weight.normal_(0, 1)
        if labels > SIZE + 1:  # letters and the blank alone
            letters = torch.tensor([0, *map(ord, LETTERS)])
            silent = torch.ones(labels, dtype=torch.bool).scatter(0, letters, False)
            out.bias.masked_fill_(silent, -1e4)
        else:  # no marks
            out.bias[1 : 1 + 4] = -1e4
    return made


def inputs(windows: tuple[int, ...] = (3,), seed: int = 0) -> dict[str, Tensor]:
    """A row per sound of so many windows, padded as the processor does: prompts on the left."""
    noise = torch.Generator().manual_seed(seed)
    most, rows = max(windows), len(windows)
    lengths = torch.tensor(windows)[:, None] * MADE
    mask = torch.arange(most * MADE) < lengths
    longest = most * MADE + 2
    ids = torch.full((rows, longest), PAD)
    for row, count in enumerate(windows):
        own = [ASK, *[AUDIO] * (count * MADE), ASK]
        ids[row, longest - len(own) :] = torch.tensor(own)
    features = torch.randn(rows, most * WINDOW, 6, generator=noise)
    return {
        "input_ids": ids,
        "attention_mask": (ids != PAD).long(),
        "input_features": features,
        "input_features_mask": mask,
    }
