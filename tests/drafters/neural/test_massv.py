"""A small language model with a projector: loading, decoding, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mmspec
from mmspec.drafters.neural import massv
from tests import toys
from tests.covering import exhaustive

torch.set_num_threads(1)

ROOM = 24
WIDTHS = {"llava": 32, "paligemma": 32, "qwen2_5_vl": 64, "llava_next": 64}


def projector(source: int, drafter: int = 48) -> massv.Projector:
    torch.manual_seed(0)
    return massv.Projector(source, drafter).eval()


def small() -> Any:
    return toys.model("llama", layers=1, hidden_size=48)


@pytest.mark.parametrize("family", exhaustive(WIDTHS, [*WIDTHS][::2]))
def test_the_output_is_the_targets_and_the_picture_is_seen(family: str) -> None:
    model, request = toys.model(family), toys.inputs(family, batch=3, ragged=True)
    parts: dict[str, Any] = {"drafter": small(), "projector": projector(WIDTHS[family])}
    fast = mmspec.accelerate(model, "massv", **parts)
    assert fast.sees == "target-features"
    out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
    expected = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert torch.equal(out.sequences, expected)
    assert out.stats.fallback is None


@torch.no_grad()
def test_the_tower_is_what_the_targets_own_projector_reads() -> None:
    """Its own projector on the tower's features gives the projected features."""
    for family, name in (
        ("llava", "multi_modal_projector"),
        ("paligemma", "multi_modal_projector"),
    ):
        model, request = toys.model(family), toys.inputs(family)
        out = model.model.get_image_features(pixel_values=request["pixel_values"], **select(model))
        backbone = mmspec.accelerate(model, "plain").session.bound.backbone
        tower = backbone.feature_layout(tower=True).parts(out)
        assert backbone.tower_width == tower[0].shape[-1] == 32
        own = getattr(model.model, name)(torch.stack(list(tower)))
        torch.testing.assert_close(own[0], backbone.feature_layout().parts(out)[0])


def select(model: Any) -> dict[str, Any]:
    if model.config.model_type != "llava":
        return {}
    names = ("vision_feature_layer", "vision_feature_select_strategy")
    return {name: getattr(model.config, name) for name in names}


def test_a_folder_holds_a_language_model_and_its_projector(tmp_path: Path) -> None:
    model, request = toys.model("llava"), toys.inputs("llava")
    drafter = toys.model("llama", layers=1, hidden_size=48)
    drafter.get_output_embeddings().bias = None  # a folder holds what the class has
    made = projector(32)
    massv.save(tmp_path, drafter, made)
    loaded = massv.load_projector(tmp_path)
    assert all(
        torch.equal(one, two)
        for one, two in zip(made.parameters(), loaded.parameters(), strict=True)
    )
    settings = {"max_new_tokens": ROOM, "do_sample": False}
    here = mmspec.accelerate(model, "massv", drafter=drafter, projector=made)
    there = mmspec.accelerate(model, "massv", drafter=tmp_path)
    one, two = here.generate(**request, **settings), there.generate(**request, **settings)
    assert torch.equal(one.sequences, two.sequences)
    assert one.stats.per_step_accepted == two.stats.per_step_accepted


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "needs its projector"),
        ({"projector": massv.Projector(16, 48)}, "maps 16 to 48.*features are 32 wide"),
        ({"projector": massv.Projector(32, 64)}, "maps 32 to 64.*draft model 48"),
        ({"projector": True}, "projector=True is neither a projector nor a path"),
        ({"projector": "nowhere"}, "nowhere has no projector.safetensors"),
        ({"projector": massv.Projector(32, 48), "sees": "nothing"}, "drop sees="),
    ],
)
def test_what_does_not_fit_is_refused(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mmspec.accelerate(toys.model("llava"), "massv", drafter=small(), **parts)


def test_a_draft_model_with_eyes_takes_the_targets_features_as_they_are() -> None:
    model, request = toys.model("llava"), toys.inputs("llava")
    fast = mmspec.accelerate(model, "massv", drafter=toys.model("llava"), length=4)
    out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert out.stats.target_calls == 5
