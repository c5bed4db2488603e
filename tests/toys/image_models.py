"""Tiny, randomly initialised image models of real classes, and requests for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    ChameleonConfig,
    ChameleonForConditionalGeneration,
    Emu3Config,
    Emu3ForConditionalGeneration,
    GenerationConfig,
    JanusConfig,
    JanusForConditionalGeneration,
)

from mmspec.models.chameleon import ChameleonForImageGeneration
from mmspec.models.llamagen import LlamaGenConfig, LlamaGenForImageGeneration

CODES, SIDE, BOI, EOL, EOS = 64, 4, 9, 12, 2
FIRST = 100  # token of code 0, where codes are words of the vocabulary
WORDS = range(20, 90)
CONDITION, FEATURES, CLASSES = 7, 12, 5
_TEXT: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}
_VQ: dict[str, Any] = {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1}


def emu3(**vq: Any) -> Any:
    names = {f"<|visual token {code:06d}|>": FIRST + code for code in range(CODES)}
    names |= {"<image>": 10, "<|extra_200|>": EOL, "<|extra_201|>": 13, "<|image end|>": 14}
    own = {"codebook_size": CODES, "embed_dim": 4, "latent_channels": 4, "attn_resolutions": []}
    own |= {"hidden_size": 32, "num_attention_heads": 2}
    config = Emu3Config(text_config=_TEXT, vq_config=_VQ | own | vq, vocabulary_map=names)
    return build_model(Emu3ForConditionalGeneration, config)


def janus(side: int = SIDE, **vq: Any) -> Any:
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "depth": 2}
    vision |= {"image_size": 16 * side, "patch_size": 16, "projection_dim": 32, "mlp_ratio": 2}
    own = {"embed_dim": 8, "num_embeddings": CODES, "latent_channels": 8, "num_hidden_layers": 2}
    own |= {"image_token_embed_dim": 32, "projection_dim": 32}
    config = JanusConfig(
        text_config=_TEXT | {"model_type": "llama"},
        vision_config=vision | {"num_image_tokens": side**2},
        vq_config=_VQ | own | vq,
        tie_word_embeddings=False,
    )
    toy = build_model(JanusForConditionalGeneration, config)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": EOS}
    toy.generation_config = GenerationConfig(**ids, generation_kwargs={"boi_token_id": BOI})
    return toy


def llamagen_class(side: int = SIDE, **vq: Any) -> Any:
    return _llamagen({"condition": "class", "num_classes": CLASSES, "side": side}, vq)


def llamagen_caption(**vq: Any) -> Any:
    own = {"condition": "caption", "condition_length": CONDITION, "caption_size": FEATURES}
    return _llamagen(own, vq)


def chameleon(cls: Any = ChameleonForImageGeneration, **vq: Any) -> Any:
    spelt = str.maketrans("0123456789", "ABCDEFGHIJ")
    names = {f"IMGIMG{str(c).translate(spelt)}Z": FIRST + c for c in range(CODES)}
    own = {"embed_dim": 8, "num_embeddings": CODES, "latent_channels": 8, "resolution": 64}
    config = ChameleonConfig(
        **_TEXT, vq_config=_VQ | own | vq, vocabulary_map=names | {"<image>": 10}
    )
    return build_model(cls, config)


def stock_chameleon() -> Any:
    return chameleon(ChameleonForConditionalGeneration)


PAINTERS: dict[str, Callable[..., Any]] = {
    "emu3": emu3,
    "janus": janus,
    "llamagen-class": llamagen_class,
    "llamagen-caption": llamagen_caption,
    "chameleon": chameleon,
}


def request(family: str, batch: int = 1, seed: int = 0) -> dict[str, Any]:
    """A request of `batch` rows of different lengths, and unconditional prompts of others."""
    noise = torch.Generator().manual_seed(100 + seed)
    if family == "llamagen-class":
        return {"class_ids": torch.randint(CLASSES, (batch,), generator=noise)}
    if family == "llamagen-caption":
        pads = torch.tensor([(3 * row) % CONDITION for row in range(batch)])[:, None]
        mask = (torch.arange(CONDITION) >= pads).long()
        features = torch.randn(batch, CONDITION, FEATURES, generator=noise)
        return {"caption": features, "caption_mask": mask}
    rows = [[1, *_words(3 + (4 * row) % 5, noise), BOI] for row in range(batch)]
    given: dict[str, Any] = pad_prompts(rows)
    if family == "emu3":
        given["negative"] = pad_prompts(
            [[1, *_words(1 + 5 * row % 6, noise), BOI] for row in range(batch)]
        )
    return given


def pad_prompts(rows: list[list[int]]) -> dict[str, Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def _words(count: int, noise: torch.Generator) -> list[int]:
    ids: list[int] = torch.randint(WORDS.start, WORDS.stop, (count,), generator=noise).tolist()
    return ids


def _llamagen(own: dict[str, Any], vq: dict[str, Any]) -> Any:
    shape = {**_TEXT, "vocab_size": CODES, "pad_token_id": None, "bos_token_id": None}
    picture = {"num_embeddings": CODES, "embed_dim": 8, "latent_channels": 8, **_VQ, **vq}
    shape |= {"eos_token_id": None, "side": SIDE, "vq_config": picture}
    config = LlamaGenConfig(**shape | own)
    return build_model(LlamaGenForImageGeneration, config)


@torch.no_grad()
def build_model(cls: Any, config: Any) -> Any:
    """A float32 model with large weights, so that greedy images depend on the prompt."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        toy = cls(config).float().eval()
        toy.set_attn_implementation("sdpa")
        for module in toy.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=1.6 / module.in_features**0.5)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight)
    return toy
