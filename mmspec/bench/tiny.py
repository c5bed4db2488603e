"""Tiny random language models: few enough tokens that every law can be counted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mmspec.models.heads.feature_head import FeatureHead, FeatureHeadConfig

PROMPT = (1, 2, 3, 1, 2)  # repeats itself, so that drafters that copy find something


def tiny(vocabulary: int = 5, layers: int = 2, seed: int = 0) -> Any:
    """A Llama of random wide weights in float32, whose laws are neither flat nor peaked."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    maker: Any = transformers.LlamaForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = maker(config).float().eval()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() > 1:
                    weight.normal_(0.0, 1.2 / weight.shape[1] ** 0.5)
    model.generation_config.eos_token_id = None
    return model


def tiny_head(model: Any, seed: int = 0) -> FeatureHead:
    """A feature head of a small language model, untrained, with weights as wide."""
    text = model.config.get_text_config(decoder=True)
    config = FeatureHeadConfig.of(text, int(text.vocab_size))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = FeatureHead(config)
        head.train(False)
        with torch.no_grad():
            for weight in head.parameters():
                if weight.dim() > 1:
                    weight.normal_(0.0, 1.2 / weight.shape[1] ** 0.5)
    return head


@torch.no_grad()
def joint(model: Any, length: int, prompt: Sequence[int] = PROMPT) -> Tensor:  # (V,) * length
    """The model's own law of its next `length` tokens, by trying all of them."""
    size = int(model.config.vocab_size)
    mass = torch.ones((), dtype=torch.float64)
    for depth in range(length):
        prefixes = [[*prompt, *more] for more in product(range(size), repeat=depth)]
        laws = model(input_ids=torch.tensor(prefixes)).logits[:, -1].double().softmax(-1)
        mass = mass[..., None] * laws.reshape(*mass.shape, size)
    return mass


def request(batch: int, prompt: Sequence[int] = PROMPT) -> dict[str, Tensor]:
    """The prompt, `batch` times."""
    ids = torch.tensor([list(prompt)]).expand(batch, -1).contiguous()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
