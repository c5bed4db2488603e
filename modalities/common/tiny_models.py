"""Tiny random language models, whose distributions can be enumerated."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mmspec.api import accelerate
from mmspec.models.loading import random_model
from mmspec.recipe import Recipe

PROMPT = (1, 2, 3, 1, 2)  # repetitive, for drafters that copy


def tiny_llama(vocabulary: int = 5, layers: int = 2, seed: int = 0) -> Any:
    """Make a Llama with random weights in float32."""
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
    model = random_model(lambda: maker(config), seed)
    model.generation_config.eos_token_id = None
    return model


def random_drafter(plan: Recipe, target: Any, seed: int = 0) -> Any:
    """Make a draft model of the first kind that a recipe accepts, with random weights."""
    reader = accelerate(target, "plain").session.bound.backbone
    return plan.draft_model[0].random(reader, seed)


@torch.no_grad()
def joint_distribution(
    model: Any, length: int, prompt: Sequence[int] = PROMPT, ids: range | None = None
) -> Tensor:  # (V,) * length
    """Enumerate the model's distribution of its next `length` tokens.

    With `ids`, other tokens are impossible.
    """
    tokens = ids or range(int(model.config.vocab_size))
    mass = torch.ones((), dtype=torch.float64)
    for depth in range(length):
        prefixes = [[*prompt, *more] for more in product(tokens, repeat=depth)]
        logits = model(input_ids=torch.tensor(prefixes)).logits[:, -1].double()
        distributions = logits[:, tokens.start : tokens.stop].softmax(-1)
        mass = mass[..., None] * distributions.reshape(*mass.shape, len(tokens))
    return mass


def request(batch: int, prompt: Sequence[int] = PROMPT) -> dict[str, Tensor]:
    """Return a request with the prompt `batch` times."""
    ids = torch.tensor([list(prompt)]).expand(batch, -1).contiguous()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
