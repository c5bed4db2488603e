"""The zoo's models that speak: small Llamas whose vocabulary is words, then codes of the codec.

A prompt is `<speaker> words <speech>`, and what follows are codes up to `</speech>`. The target is
deep and narrow, so that several codes cost a forward little more than one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from math import prod
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mmspec.modalities.speech.synthesis import LAYOUT
from mmspec.modalities.speech.synthesis.held_out import SPEAKERS
from mmspec.modalities.speech.synthesis.layout import SpeechCodes
from mmspec.zoo.tokenizer import word_tokenizer
from tools.zoo.speech.synthesis.codec import LEVELS

BEGIN, END = "<speech>", "</speech>"
PLACES = 320  # tokens of a prompt and its speech
_SPECIAL = ("<pad>", "<unk>", BEGIN, END, *(f"<{speaker}>" for speaker in SPEAKERS))


@dataclass(frozen=True)
class SpeakerShape:
    """The size of a model."""

    layers: int
    width: int
    inner: int
    heads: int


TARGET = SpeakerShape(12, 80, 160, 4)
DRAFTER = SpeakerShape(1, 80, 160, 4)


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per word of the Scene world."""
    return word_tokenizer(_SPECIAL, pad_token="<pad>", unk_token="<unk>")


def layout() -> SpeechCodes:
    """Codes stand behind all words."""
    table = tokenizer().get_vocab()
    voices = {speaker: table[f"<{speaker}>"] for speaker in SPEAKERS}
    return SpeechCodes(len(table), prod(LEVELS), table[BEGIN], table[END], voices)


def speaker(shape: SpeakerShape) -> LlamaForCausalLM:
    """An untrained model."""
    where = layout()
    build: Any = LlamaConfig
    config = build(
        vocab_size=where.first + where.count,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=PLACES,
        tie_word_embeddings=True,
        pad_token_id=tokenizer().pad_token_id,
        bos_token_id=where.begin,
        eos_token_id=where.end,
        **{LAYOUT: asdict(where)},
    )
    return LlamaForCausalLM(config)


def prompt(text: str, voice: str) -> list[int]:
    """The ids in front of speech."""
    where = layout()
    words: Sequence[int] = tokenizer()(text, add_special_tokens=False)["input_ids"]
    return [where.voices[voice], *words, where.begin]
