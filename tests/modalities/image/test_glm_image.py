"""GLM-Image: tokens by a recipe of tokens, the picture of them by a recipe of diffusion."""

from __future__ import annotations

import importlib
import pkgutil
import re
from typing import Any

import diffusers
import pytest
import torch
import transformers
from torch.testing import assert_close
from transformers import models

import mmspec
from mmspec.verifiers.tolerance_window import ToleranceWindow
from tests.toys import glm_image

PROMPT, SIDE = "a red square", 64
CALL: dict[str, Any] = {
    "prompt": PROMPT,
    "height": SIDE,
    "width": SIDE,
    "num_inference_steps": 6,
    "max_sequence_length": 64,
    "output_type": "latent",
}
pytestmark = pytest.mark.exhaustive


def noise() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def test_both_phases_give_the_picture_of_the_pipeline() -> None:
    pipe = glm_image.pipeline()
    own = pipe(**CALL, generator=noise()).images
    chat = [[{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]]
    inputs = pipe.processor.apply_chat_template(chat, target_h=SIDE, target_w=SIDE)
    tokens = mmspec.accelerate(pipe.vision_language_encoder, "token-recycling")
    (large, small), start = inputs["image_grid_thw"][:, 1:].tolist(), inputs["input_ids"].shape[1]
    first, count = start + small[0] * small[1], large[0] * large[1]
    out = tokens.generate(**inputs, max_new_tokens=first - start + count + 1, do_sample=True)
    cells = out.sequences[:, first : first + count].unflatten(1, large)
    prior = cells.repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)
    assert torch.equal(prior, pipe.generate_prior_tokens(PROMPT, SIDE, SIDE)[0])

    fast = mmspec.accelerate(pipe, "paradigms", window=3, verifier=ToleranceWindow(0.0))
    assert_close(
        fast(**CALL, prior_token_ids=prior, generator=noise()).images, own, rtol=1e-4, atol=1e-5
    )
    assert_close(fast(**CALL, generator=noise()).images, own, rtol=1e-4, atol=1e-5)
    other = fast(**CALL, prior_token_ids=(prior + 1) % glm_image.CODES, generator=noise()).images
    assert not torch.allclose(other, own, atol=1e-3)  # negative control: the tokens matter


def test_exact_and_forecast_recipes_run_on_given_tokens() -> None:
    pipe = glm_image.pipeline()
    prior = pipe.generate_prior_tokens(PROMPT, SIDE, SIDE)[0]
    exact = mmspec.accelerate(pipe, "asd", sampler="stochastic")
    forecast = mmspec.accelerate(pipe, "taylorseer", interval=2, warm_up=1)
    for fast in (exact, forecast):
        found = fast(**CALL, prior_token_ids=prior, generator=noise()).images
        assert bool(found.isfinite().all())
    assert forecast.last_stats is not None
    assert forecast.last_stats.target_calls < forecast.last_stats.num_new_tokens


def test_libraries_have_no_class_of_models_that_the_reference_leaves_out() -> None:
    """If this fails, a class has come: support it, or change docs/reference/images.md."""
    names = {*dir(transformers), *dir(diffusers)}
    names |= {module.name for module in pkgutil.iter_modules(models.__path__)}
    pattern = re.compile(r"hunyuan_?image_?3|emu_?3_?5|bagel", re.IGNORECASE)
    assert not [name for name in names if pattern.search(name)]
    assert importlib.import_module("transformers").GlmImageForConditionalGeneration
