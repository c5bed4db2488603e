"""pi0: windows of Euler steps behind one prefix give what the model's own loop gives."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PI0Config, PI0ForConditionalGeneration

import mmspec
from mmspec.draft import Round
from mmspec.modalities.vla.flow import sample_actions
from mmspec.models.loading import random_model
from mmspec.verifiers.tolerance_window import ToleranceWindow
from tests import toys

IMAGE, WORDS, PATCHES, CHUNK, SIZE, STATE = 63, 60, 4, 5, 4, 3
STEPS = 10
EXACT = ToleranceWindow(0.0)


def _config() -> PI0Config:
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    gemma = {"model_type": "gemma", "num_key_value_heads": 1, "head_dim": 16, **layers}
    eyes = {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14, **layers}
    return PI0Config(
        vlm_config={
            "model_type": "paligemma",
            "image_token_id": IMAGE,
            "projection_dim": 32,
            "text_config": {**gemma, "hidden_size": 32, "vocab_size": 64},
            "vision_config": {**eyes, "hidden_size": 32, "vision_use_head": False},
        },
        dit_config={**gemma, "hidden_size": 24},
        chunk_size=CHUNK,
        max_action_dim=SIZE,
        max_state_dim=STATE,
        num_inference_steps=STEPS,
    )


@cache
def policy() -> Any:
    return random_model(lambda: PI0ForConditionalGeneration(_config()), 0)


def request(pads: tuple[int, ...] = (0,), seed: int = 0) -> dict[str, Any]:
    """Pictures of two cameras, of which the last row has one; rows are padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    batch, length = len(pads), 2 * PATCHES + 6
    ids = torch.randint(3, WORDS, (batch, length), generator=generator)
    mask, cameras = torch.ones_like(ids), torch.ones(batch, 2, dtype=torch.bool)
    for row, pad in enumerate(pads):
        ids[row, pad : pad + 2 * PATCHES] = IMAGE
        ids[row, :pad], mask[row, :pad] = 0, 0
    return {
        "state": torch.randn(batch, STATE, generator=generator),
        "input_ids": ids,
        "pixel_values": torch.randn(batch, 2, 3, 28, 28, generator=generator),
        "pixel_attention_mask": cameras,
        "attention_mask": mask,
        "noise": torch.randn(batch, CHUNK, SIZE, generator=generator),
    }


@pytest.mark.parametrize("pads", [(0,), (0, 3, 1)])
@pytest.mark.parametrize("window", [1, 3, 10])
def test_states_that_equal_the_targets_are_the_models_own(
    pads: tuple[int, ...], window: int
) -> None:
    given = request(pads)
    expected = policy().sample_actions(**given)
    found = sample_actions(policy(), verifier=EXACT, window=window, **given)
    assert found.actions.shape == (len(pads), CHUNK, SIZE)
    assert found.stats.exact
    torch.testing.assert_close(found.actions, expected, atol=2e-5, rtol=1e-4)
    assert (expected - given["noise"]).abs().mean() > 0.1  # the steps do something


def test_without_a_mask_and_in_pieces() -> None:
    given = request()
    del given["attention_mask"]
    expected = policy().sample_actions(**given)
    found = sample_actions(policy(), verifier=EXACT, window=4, max_rows=2, **given)
    torch.testing.assert_close(found.actions, expected, atol=2e-5, rtol=1e-4)


def test_a_tolerance_saves_forwards_and_is_said_to_be_lossy() -> None:
    given = request((0, 3, 1))
    plain = sample_actions(policy(), verifier=EXACT, window=1, **given)
    rounds = list[Round]()
    loose = sample_actions(policy(), window=10, on_round=rounds.append, **given)
    assert plain.stats.target_calls == STEPS
    assert loose.stats.target_calls == len(rounds) < STEPS
    assert not loose.stats.exact
    near, span = (loose.actions - plain.actions).abs().mean(), plain.actions.std()
    assert 0 < near < 0.2 * span


def test_rows_do_not_look_at_each_other() -> None:
    given = request((0, 0))
    both = sample_actions(policy(), window=5, **given).actions
    for row in range(2):
        own = {name: value[row : row + 1] for name, value in given.items()}
        alone = sample_actions(policy(), window=5, **own).actions
        torch.testing.assert_close(alone[0], both[row], atol=2e-5, rtol=1e-4)
    other = sample_actions(policy(), window=5, **{**given, "state": -given["state"]}).actions
    assert not torch.allclose(other, both)


def test_noise_comes_from_the_seed_and_steps_from_the_call() -> None:
    given = request()
    del given["noise"]
    one_of_numpy: Any = np.int64(1)
    one, same, other = (
        sample_actions(policy(), seed=seed, num_steps=4, **given) for seed in (1, one_of_numpy, 2)
    )
    assert torch.equal(one.actions, same.actions)
    assert not torch.equal(one.actions, other.actions)
    assert one.stats.num_new_tokens == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": "prompt-lookup"}, "decodes tokens"),
        ({"recipe": "accelerated-diffusion"}, "deterministic"),
        ({"recipe": "taylorseer"}, "Euler"),
        ({"noise": torch.zeros(1, 2, 2)}, r"\(1, 5, 4\)"),
        ({"num_steps": 0}, "num_steps=0"),
        ({"seed": 0.5}, "seed=0.5 must be a whole number"),
        ({"window": 0}, "window=0"),
        ({"state": None}, "lacks state"),
        ({"images": 1}, "has images"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample_actions(policy(), **{**request(), **changes})


def test_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match="is not a flow-matching policy"):
        sample_actions(toys.model("llava"), **request())


def test_accelerate_says_where_to_go() -> None:
    with pytest.raises(ValueError, match=r"generates no tokens.*flow\.sample_actions"):
        mmspec.accelerate(policy(), "plain")
