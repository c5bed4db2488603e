"""Published model shapes with random weights and predictable greedy outputs.

Only the text decoder is built, which dominates the cost of a round. Purely random weights give
near-ties that depend on kernel shapes in half precision. Therefore the embeddings dominate the
residual stream, and the output head maps every token to one successor with a clear margin. Matrix
sizes are the published ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from mmspec.modality import RunResult
from mmspec.models import placement

EMBEDDING_SCALE = 8.0  # of an embedding over the output of one layer


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a text decoder. `family` is the transformers class it is built from."""

    family: str
    layers: int
    hidden: int
    inner: int
    heads: int
    key_value_heads: int
    vocabulary: int
    head_width: int | None = None
    tied: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


SHAPES: Mapping[str, DecoderShape] = {
    "llava-1.5-7b": DecoderShape("llama", 32, 4096, 11008, 32, 32, 32064),
    "llava-1.5-13b": DecoderShape("llama", 40, 5120, 13824, 40, 40, 32064),
    "qwen2.5-vl-3b": DecoderShape("qwen2", 36, 2048, 11008, 16, 2, 151936, tied=True),
    "qwen2.5-vl-7b": DecoderShape("qwen2", 28, 3584, 18944, 28, 4, 152064),
    "qwen2.5-vl-72b": DecoderShape("qwen2", 80, 8192, 29568, 64, 8, 152064),
    "qwen2-vl-2b": DecoderShape("qwen2", 28, 1536, 8960, 12, 2, 151936, tied=True),
    "qwen2-vl-7b": DecoderShape("qwen2", 28, 3584, 18944, 28, 4, 152064),
    "llama-3.2-1b": DecoderShape("llama", 16, 2048, 8192, 32, 8, 128256, tied=True),
    "smollm2-135m": DecoderShape("llama", 30, 576, 1536, 9, 3, 49152, tied=True),
    "small": DecoderShape("llama", 16, 512, 1408, 8, 8, 8192),
    "tiny": DecoderShape("llama", 4, 128, 256, 4, 4, 512),
    "probe": DecoderShape(
        "llama", 1, 32, 64, 1, 1, 512
    ),  # 4096 tokens of it stay in a core's cache
}


def parse_device(name: str | None) -> torch.device:
    """Return a device by name; default: cuda where available. Raises ValueError if unavailable."""
    return placement.parse_device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def build_model(
    name: str, device: torch.device, dtype: torch.dtype, positions: int = 8192, seed: int = 0
) -> Any:
    """Build a causal model of a shape. Raises ValueError listing the known shapes."""
    if name not in SHAPES:
        raise ValueError(f"unknown shape {name!r}; known shapes: {', '.join(SHAPES)}")
    model = _random(SHAPES[name], device, dtype, positions, seed)
    _set_successors(model, seed)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def _random(
    shape: DecoderShape, device: torch.device, dtype: torch.dtype, positions: int, seed: int
) -> Any:
    import transformers

    makers: dict[str, Any] = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    }
    config, model = makers[shape.family]
    sizes = config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=positions,
        tie_word_embeddings=False,  # a tied head would repeat each token; the cost is the same
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            return model(sizes)
        finally:
            torch.set_default_dtype(before)


@dataclass(frozen=True)
class FixedLength:
    """Runner that decodes `max_new_tokens` greedy tokens; these models have no end token."""

    model: Any  # the model, or accelerated
    max_new_tokens: int

    def run(self, request: Mapping[str, Any], seed: int = 0) -> RunResult:
        out = self.model.generate(**request, do_sample=False, max_new_tokens=self.max_new_tokens)
        sequences, stats = (out, None) if isinstance(out, Tensor) else (out.sequences, out.stats)
        tokens = sequences[:, request["input_ids"].shape[1] :].tolist()
        calls = self.max_new_tokens - 1 if stats is None else stats.target_calls
        return RunResult(tokens, sum(map(len, tokens)), calls, stats=stats)

    def run_first_token(self, request: Mapping[str, Any], seed: int = 0) -> RunResult:
        return FixedLength(self.model, 1).run(request, seed)


@torch.no_grad()
def _set_successors(model: Any, seed: int) -> None:
    """Give every token one clear successor: output rows are the embeddings, shifted by one."""
    embeddings = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    embeddings.normal_(0.0, EMBEDDING_SCALE * model.config.num_hidden_layers**0.5)
    length = embeddings.norm(dim=1, dtype=torch.float32).mean()
    order = torch.randperm(embeddings.shape[0], generator=torch.Generator().manual_seed(seed))
    order = order.to(embeddings.device)
    head[order.roll(-1)] = embeddings[order] / length.to(embeddings.dtype)


def random_prompt(
    vocabulary: int, length: int, device: torch.device, batch: int = 1, seed: int = 0
) -> dict[str, Any]:
    """Make a batch of random token ids, without special ones (0 to 3)."""
    noise = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, vocabulary, (batch, length), generator=noise).to(device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
