"""Begin a model of one family with the text layers of another: the language is the same."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast


@torch.no_grad()
def speak_like(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    other: PreTrainedModel,
    other_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Copy layers, norms and the vectors of common words from `other` into `model`.

    Both have text models of one shape. What only `model` has (the biases of Qwen2) is left alone.
    """
    source = dict(_text(other).named_parameters())
    for name, weight in _text(model).named_parameters():
        if name in source and source[name].shape == weight.shape:
            weight.copy_(source[name])
    known = other_tokenizer.get_vocab()
    here, there = _vectors(model), _vectors(other)
    for word, row in tokenizer.get_vocab().items():
        if word in known:
            here[row] = there[known[word]]


def _text(model: PreTrainedModel) -> nn.Module:
    """The layers and the last norm: what is left of a text model without its vocabulary."""
    decoder = model.get_decoder()
    return nn.ModuleDict({"layers": decoder.layers, "norm": decoder.norm})


def _vectors(model: PreTrainedModel) -> Tensor:  # -> (V, D)
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight
