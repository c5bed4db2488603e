"""The bundled codec language models: small Llamas with a vocabulary of words, then codec codes.

A sequence is `<speaker> words <speech>`, then codes, then `</speech>`. The target is deep and
narrow, so that a forward over several codes costs little more than over one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from math import prod
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mmspec.modalities.speech import LAYOUT
from mmspec.modalities.speech.synthesis.layout import SpeechCodes
from mmspec.modalities.speech.utterances import ZOO_VOICES
from mmspec.zoo.tokenizer import word_tokenizer
from tools.zoo.speech.synthesis.codec import LEVELS

BEGIN, END = "<speech>", "</speech>"
MAX_POSITIONS = 320  # of prompt and speech
_SPECIAL = ("<pad>", "<unk>", BEGIN, END, *(f"<{speaker}>" for speaker in ZOO_VOICES))


@dataclass(frozen=True)
class ModelSize:
    """Dimensions of a model."""

    layers: int
    width: int
    inner: int
    heads: int


TARGET = ModelSize(12, 80, 160, 4)
DRAFTER = ModelSize(1, 80, 160, 4)


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per word of the Scene world."""
    return word_tokenizer(_SPECIAL, pad_token="<pad>", unk_token="<unk>")


def speech_layout() -> SpeechCodes:
    """The layout of the vocabulary: codes follow all words."""
    table = tokenizer().get_vocab()
    voices = {speaker: table[f"<{speaker}>"] for speaker in ZOO_VOICES}
    return SpeechCodes(len(table), prod(LEVELS), table[BEGIN], table[END], voices)


def build_model(shape: ModelSize) -> LlamaForCausalLM:
    """An untrained model."""
    layout = speech_layout()
    build: Any = LlamaConfig
    config = build(
        vocab_size=layout.first + layout.count,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        pad_token_id=tokenizer().pad_token_id,
        bos_token_id=layout.begin,
        eos_token_id=layout.end,
        **{LAYOUT: asdict(layout)},
    )
    return LlamaForCausalLM(config)


def build_prompt(text: str, voice: str) -> list[int]:
    """The ids of a prompt."""
    layout = speech_layout()
    words: Sequence[int] = tokenizer()(text, add_special_tokens=False)["input_ids"]
    return [layout.voices[voice], *words, layout.begin]
