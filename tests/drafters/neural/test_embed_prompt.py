"""A compressor that keeps all tokens changes nothing, also in unlisted families."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

import mmspec
from mmspec.modalities.vlm import survey
from mmspec.modalities.vlm.tiny_requests import requests
from tests.covering import exhaustive

NEW: dict[str, Any] = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
FEWEST = 3  # calls: one token comes with the prefill, then five per call
PARTS: list[dict[str, Any]] = [
    {"compressor": "identity"},
    {"compressor": "attn-topk:keep=1"},
    {"sees": "target-features"},
]


@pytest.mark.parametrize(
    "name",
    exhaustive(
        [
            *("Glm4v", "PaddleOCRVL", "Ernie4_5_VLMoe"),  # M-RoPE
            "HunYuanVL",  # on four axes
            *("Kimi_K25", "VideoLlama3"),  # which say elsewhere how patches are merged
        ],
        ("PaddleOCRVL", "HunYuanVL", "VideoLlama3"),
    ),
)
def test_keeping_all_is_seeing_all(name: str) -> None:
    model = survey.build(f"{name}ForConditionalGeneration")
    request = next(requests(model, 2))
    expected = model.generate(**request, **NEW)
    for parts in PARTS:
        fast = mmspec.accelerate(model, "coupled", drafter=model, length=4, **parts)
        out = fast.generate(**request, **NEW)
        assert torch.equal(out.sequences, expected)
        assert (out.stats.fallback, out.stats.target_calls) == (None, FEWEST)


def test_an_encoder_that_does_not_project_is_told_in_words() -> None:
    """Llama 4 projects after what `generate()` calls its encoder, and hides its layers."""
    model = survey.build("Llama4ForConditionalGeneration")
    request = next(requests(model, 1))
    fast: Any = mmspec.accelerate(model, "coupled", drafter=model, compressor="identity")
    if hf.__version__ != "5.24.0":  # where its forward fails: it reads image_outputs of the text
        assert "before the model's projector" in fast.generate(**request, **NEW).stats.fallback
    for needy in ("attn-topk", "uv-prune"):
        with pytest.raises(ValueError, match="has no list of layers"):
            mmspec.accelerate(model, "coupled", drafter=model, compressor=needy)


@pytest.mark.parametrize("name", ["Qwen3VLMoe", "Cosmos3Omni"])
def test_features_inside_the_decoder_are_told_of_any_family(name: str) -> None:
    model = survey.build(f"{name}ForConditionalGeneration")
    for parts in PARTS:
        with pytest.raises(ValueError, match="deepstack"):
            mmspec.accelerate(model, "coupled", drafter=model, **parts)
