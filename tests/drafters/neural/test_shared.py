"""Drafting on the target's own cache must not change the target's output."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmspec
from mmspec.drafters.neural.shared import SharedBackbone, spread_layers
from mmspec.targets.readers.backbone import Backbone
from tests import toys
from tests.covering import covering, exhaustive, limited
from tests.toys import readers as families
from tests.toys.texts import prompts, text

torch.set_num_threads(1)

ROOM = 14
SHAPES: list[dict[str, Any]] = [{"length": 4}, {"tree": [2, 2, 1]}, {"tree": "dynamic"}]
FAMILIES = ("llama", "mistral-sliding", "gemma3-text", "llava", "qwen2_5_vl", "qwen3_vl")


@pytest.mark.parametrize(
    ("family", "ragged", "shape"),
    limited(covering(FAMILIES, (True, False), SHAPES, strength=1), 4),
    ids=str,
)
def test_greedy_output_is_the_targets_own(family: str, ragged: bool, shape: dict[str, Any]) -> None:
    model = toys.model(family, layers=2)
    request = toys.inputs(family, batch=3 if ragged else 1, ragged=ragged)
    expected = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    fast = mmspec.accelerate(model, "swift", skip=(0,), **shape)
    out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert torch.equal(out.sequences, expected)
    assert out.stats.fallback is None


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("family", limited(FAMILIES, 3))
def test_skipping_nothing_accepts_everything(family: str, ragged: bool) -> None:
    model = toys.model(family, layers=2)
    request = toys.inputs(family, batch=3 if ragged else 1, ragged=ragged)
    fast = mmspec.accelerate(model, "layer-skip", depth=2, length=4)
    out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert out.stats.target_calls == 3  # one token of the prompt, then five a call
    assert out.stats.drafter_saw == "target-memory"


@pytest.mark.parametrize("recipe", ["draft-verify", "swift", "layer-skip"])
def test_seeded_output_is_that_of_plain_decoding(recipe: str) -> None:
    model, request = (
        toys.model("qwen2_5_vl", layers=3),
        toys.inputs("qwen2_5_vl", batch=3, ragged=True),
    )
    settings = {"max_new_tokens": ROOM, "temperature": 1.0, "seed": 5}
    out = mmspec.accelerate(model, recipe).generate(**request, **settings)
    assert torch.equal(out.sequences, mmspec.decode_plain(model, **request, **settings).sequences)


@pytest.mark.parametrize("recipe", ["draft-verify", "swift"])
@pytest.mark.parametrize("share", [-0.5, 1.5])
def test_what_is_no_share_of_the_layers_is_refused(recipe: str, share: float) -> None:
    with pytest.raises(
        ValueError, match=f"share={share} must be a number of at least 0 and at most 1"
    ):
        mmspec.accelerate(toys.model("llama", layers=2), recipe, share=share)


def test_the_model_is_not_touched() -> None:
    model = toys.model("gemma3-text", layers=4)
    before = [id(part) for part in model.modules()]
    draft_reader = SharedBackbone(
        Backbone(model, families.find_family(model)), skip=(1,)
    ).draft_reader
    assert [id(part) for part in model.modules()] == before
    assert len(draft_reader.decoder.layers) == 3
    assert len(model.get_decoder().layers) == 4
    kinds = model.config.layer_types
    assert draft_reader.decoder.config.layer_types[:3] == [kinds[0], kinds[2], kinds[3]]
    assert len(model.config.layer_types) == 4


def test_layers_are_spread_over_the_inside() -> None:
    assert spread_layers(32, 0.45) != spread_layers(32, 0.5)
    assert len(spread_layers(32, 0.45)) == 14  # 45 % of 30
    assert set(spread_layers(12, 0.5)) <= set(range(1, 11))
    assert spread_layers(3, 0.1) == (1,)
    assert spread_layers(2, 0.5) == ()


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("lfm2", {}, "recurrent state"),
        ("qwen3_5", {}, "recurrent state"),
        ("llama", {"depth": 3}, "depth=3 is not a number of layers; LlamaForCausalLM has 2"),
        ("llama", {"skip": (7,)}, r"skip names layers \[7\]"),
        ("llama", {"skip": (0, 1)}, "leaves no layer"),
    ],
)
def test_what_cannot_work_is_refused(family: str, options: dict[str, Any], message: str) -> None:
    model = toys.model(family, layers=2)
    with pytest.raises(ValueError, match=message):
        SharedBackbone(Backbone(model, families.find_family(model)), **options)


def test_sees_and_compressor_are_not_ignored() -> None:
    with pytest.raises(ValueError, match="drop sees="):
        mmspec.accelerate(toys.model("llava", layers=2), "swift", sees="pixels")


@pytest.mark.parametrize(
    "name",
    exhaustive(
        ("cohere", "falcon", "gemma", "glm", "gpt2", "gptj", "granite", "mixtral", "olmo", "phi"),
        ("cohere", "falcon", "gpt2", "mixtral"),
    ),
)
def test_any_decoder_with_a_list_of_layers_drafts_for_itself(name: str) -> None:
    """Scaling or capping of logits after the head is left to the model's forward."""
    model, request = text(name), prompts(3)
    expected = model.generate(**request, max_new_tokens=12, do_sample=False)
    for options in ({"skip": (0,)}, {"skip": (1,), "tree": [2, 1]}):
        out = mmspec.accelerate(model, "swift", **options).generate(
            **request, max_new_tokens=12, do_sample=False
        )
        assert torch.equal(out.sequences, expected)
        assert out.stats.fallback is None
    whole = mmspec.accelerate(model, "layer-skip", depth=2, length=4)
    out = whole.generate(**request, max_new_tokens=11, do_sample=False)
    assert out.stats.target_calls == 2  # one token of the prompt, then five a call


@pytest.mark.parametrize("recipe", ["layer-skip", "swift", "draft-verify"])
def test_layers_behind_an_encoder_are_refused(recipe: str) -> None:
    with pytest.raises(ValueError, match=r"Whisper\w+ is an encoder-decoder.*; use a draft"):
        mmspec.accelerate(toys.model("whisper", layers=2), recipe)
