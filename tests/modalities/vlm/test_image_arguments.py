"""Images under any argument name reach the model, also inside transformers' `generate()`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec.modalities.vlm import survey
from mmspec.modalities.vlm.tiny_requests import placeholder, requests

NEW: dict[str, Any] = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}


def pixels(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def assert_same(model: Any, request: dict[str, Any]) -> None:
    expected = model.generate(**request, **NEW).tolist()
    blind = {**request, **{n: v.flip(-1) for n, v in request.items() if v.is_floating_point()}}
    assert model.generate(**blind, **NEW).tolist() != expected
    fast: Any = mmspec.accelerate(model, "prompt-lookup")
    assert fast.generate(**request, **NEW).sequences.tolist() == expected
    assert model.generate(**request, **NEW, custom_generate=fast).tolist() == expected


@pytest.mark.parametrize(
    ("name", "beside"),
    [
        ("DeepseekVLHybridForConditionalGeneration", "high_res_pixel_values"),
        ("VideoLlama3ForConditionalGeneration", "image_merge_sizes"),
    ],
)
def test_what_an_encoder_takes_beside_the_pixels_is_handed_to_it(name: str, beside: str) -> None:
    model = survey.build(name)
    request = next(requests(model, 2))
    assert beside in request
    assert_same(model, request)


def test_further_crops_of_a_picture_are_handed_to_its_encoder() -> None:
    model = survey.build("Step3p7ForConditionalGeneration")
    ids = torch.tensor([[5, *[placeholder(model, "image")] * 3, 8, 9]])
    request = {"input_ids": ids, "pixel_values": pixels(1, 3, 56, 56)}
    request |= {"pixel_values_local": pixels(2, 3, 56, 56), "num_local_patches": torch.tensor([2])}
    assert_same(model, request)


@pytest.mark.parametrize(
    ("name", "other", "shape"),
    [
        ("VideoLlavaForConditionalGeneration", "pixel_values_images", (1, 3, 56, 56)),
        ("FuyuForCausalLM", "image_patches", (1, 4, 2700)),
    ],
)
def test_what_older_processors_call_a_picture_is_one(
    name: str, other: str, shape: tuple[int, ...]
) -> None:
    model = survey.build(name)
    marks = [placeholder(model, "image")] * (1 if len(shape) == 4 else shape[1])
    request = {"input_ids": torch.tensor([[5, *marks, 8, 9]]), other: pixels(*shape)}
    assert_same(model, request)
    fast: Any = mmspec.accelerate(model, "prompt-lookup")
    with pytest.raises(ValueError, match="no image token"):
        fast.generate(**{**request, "input_ids": torch.tensor([[5, 6]])}, **NEW)
