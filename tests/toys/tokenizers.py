"""Tokenizers of characters and of JSON's usual pieces, for tiny models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PIECES = (("{", '"'), ('"', ":"), ("t", "r"), ("u", "e"), ("tr", "ue"))  # merges


def byte_tokenizer(letters: Sequence[str] | None = None) -> Any:
    """A byte-level tokenizer of all bytes and some pieces, or of some letters only."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) if letters is None else letters
    pieces = PIECES if letters is None else ()
    table = {text: id for id, text in enumerate([*alphabet, *map("".join, pieces)])}
    core = Tokenizer(models.BPE(table, list(pieces)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<eos>", "<pad>"])
    build: Any = PreTrainedTokenizerFast
    return build(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>", padding_side="left")
