"""Mllama, whose cross-attention layers attend to images only and are skipped without one."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import pytest
import torch

import mmspec
from mmspec import recipes
from mmspec.modalities.common.tiny_models import random_drafter
from mmspec.modalities.vlm import survey
from mmspec.modalities.vlm.tiny_requests import requests
from mmspec.targets.readers.hooks import LayerStatesHook
from mmspec.targets.readers.kv_view import gather_view
from tests.covering import covering, limited
from tests.toys.readers import backbone

NEW: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
HEADED = ("eagle-3", "kangaroo", "fastvlm", "specvlm", "eagle-2", "aasd")
KV = ("text", "pooled:tokens=1", "sparse:tokens=0", "sparse:tokens=1,every=1")


@lru_cache(maxsize=1)
def model() -> Any:
    return survey.build("MllamaForConditionalGeneration")


def request(kind: str) -> dict[str, Any]:
    shown, said = requests(model(), 1)
    if kind == "text":
        return dict(said)
    ids = shown["input_ids"].clone()
    ids[0, 2:4] = model().config.image_token_index
    return {**shown, "input_ids": ids}


def assert_same(kind: str, *args: Any, **parts: Any) -> None:
    given = request(kind)
    expected = model().generate(**given, **NEW)
    out = mmspec.accelerate(model(), *args, **parts).generate(**given, **NEW)
    assert out.stats.fallback is None
    assert out.sequences.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("kind", "name"), limited(covering(["text", "picture"], HEADED, strength=1), 4)
)
def test_heads_draft_with_and_without_a_picture(name: str, kind: str) -> None:
    assert_same(kind, name, drafter=random_drafter(recipes.get(name), model(), 1))


@pytest.mark.parametrize("kind", ["text", "picture"])
@pytest.mark.parametrize("kv", KV)
def test_the_target_drafts_on_a_part_of_its_memory(kv: str, kind: str) -> None:
    assert_same(kind, "std", kv=kv)


@torch.no_grad()
def test_a_view_has_the_pictures_of_crossed_layers() -> None:
    reader: Any = backbone(model())
    memory, _, _ = reader.prefill(request("picture"), 8)
    view = gather_view(memory, reader.cache_config, {0: [torch.arange(memory.lengths[0])[None]]}, 8)
    mine, theirs = (one.cache.layers[1] for one in (view.memory, memory))
    assert theirs.is_cross_attention
    assert torch.equal(mine.keys, theirs.keys)


def test_states_of_a_layer_left_out_are_what_it_would_have_read() -> None:
    reader, given = backbone(model()), request("text")
    with torch.no_grad(), LayerStatesHook(reader, [1, 2]) as noted:
        reader.prefill(given, 8)
    before, after = noted.offer().chunk(2, -1)
    assert torch.equal(before, after)


@pytest.mark.parametrize("kind", ["text", "picture"])
def test_a_draft_model_may_name_crossed_layers_that_it_has_not(kind: str) -> None:
    config = copy.deepcopy(model().config)
    config.text_config.num_hidden_layers = 1
    with torch.random.fork_rng():
        torch.manual_seed(0)
        small = type(model())(config).eval()
    assert_same(kind, "coupled", drafter=small)
