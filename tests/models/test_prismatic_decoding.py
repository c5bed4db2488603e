"""The loop reads Prismatic models as they read themselves: greedy equality with `generate()`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec.drafters.neural.feature_head import FEATURE_HEAD
from mmspec.modalities.common.doctor_tokens import skeleton
from mmspec.modalities.common.families import make_reader
from mmspec.models.loading import load_causal
from mmspec.trees import Tree
from tests.covering import covering
from tests.toys import prismatic as toys
from tests.toys.prismatic import BOS, PATCHES, SIDE, WORDS

ROOM = 10
PADS = {"one": (0,), "ragged": (0, 3, 1)}


@cache
def policy() -> Any:
    return toys.openvla()


@cache
def partner() -> Any:
    """A policy that is right in part."""
    model, generator = toys.openvla(), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                noise = torch.randn(weight.shape, generator=generator)
                weight.add_(noise * weight.std() * 0.05)
    return model


@cache
def request(batch: str, kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """Prompts with a picture, as our processor or a public one makes them, or words alone."""
    pads, generator = PADS[batch], torch.Generator().manual_seed(5)
    ids = torch.randint(3, WORDS, (len(pads), 6), generator=generator)
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        ids[row, :pad], mask[row, :pad], ids[row, pad] = WORDS, 0, BOS
    given = {"input_ids": ids, "attention_mask": mask}
    if kind != "words":
        given["pixel_values"] = torch.randn(len(pads), 6, SIDE, SIDE, generator=generator)
    if kind == "marked":
        given = policy().add_image_ids(given)
    settings: Any = {"max_new_tokens": ROOM, "do_sample": False}
    return given, policy().generate(**given, **settings)


def bound(recipe: str, shape: str) -> mmspec.Accelerated:
    shapes: dict[str, dict[str, Any]] = {
        "": {},
        "chain": {"length": 3},
        "tree": {"tree": Tree.branching([2, 2, 1])},
    }
    drafter = {"coupled": partner(), "eagle": None}.get(recipe)
    if recipe == "eagle":
        drafter = FEATURE_HEAD.random(make_reader(policy()), 0)
    given = {} if drafter is None else {"drafter": drafter}
    return mmspec.accelerate(policy(), recipe, **given, **shapes[shape])


RUNS = [
    ("plain", ""),
    ("prompt-lookup", ""),
    ("coupled", "chain"),
    ("coupled", "tree"),
    ("eagle", ""),
    ("eagle", "tree"),
]


@pytest.mark.parametrize(
    ("run", "batch", "kind"), covering(RUNS, tuple(PADS), ("marked", "public", "words"), strength=1)
)
def test_greedy_tokens_are_those_of_generate(run: tuple[str, str], batch: str, kind: str) -> None:
    recipe, shape = run
    given, expected = request(batch, kind)
    fast = bound(recipe, shape)
    out = fast.generate(**given, max_new_tokens=ROOM, do_sample=False)
    assert torch.equal(out.sequences, expected)
    if recipe == "coupled":
        assert 0 < out.stats.num_accepted_draft_tokens < out.stats.num_draft_tokens


@pytest.mark.parametrize("kind", ["marked", "public"])
def test_every_entry_point_takes_a_public_prompt(kind: str) -> None:
    given, expected = request("ragged", kind)
    fast = mmspec.accelerate(policy(), "coupled", drafter=partner(), length=3, modality="vlm")
    settings: Any = {"max_new_tokens": ROOM, "do_sample": False}
    hooked = policy().generate(**given, **settings, custom_generate=fast)
    assert torch.equal(hooked, expected)
    rounds = list(fast.stream(**given, **settings))
    rows = [[token for kept in rounds for token in kept.tokens[row]] for row in range(3)]
    assert rows == expected[:, -ROOM:].tolist()
    assert torch.equal(mmspec.decode_plain(policy(), **given, **settings).sequences, expected)


def test_pictures_change_what_is_said() -> None:
    """Otherwise equality says nothing about them."""
    given, expected = request("ragged", "marked")
    other = {**given, "pixel_values": given["pixel_values"].flip(0)}
    found = policy().generate(**other, max_new_tokens=ROOM, do_sample=False)
    assert not torch.equal(found[0], expected[0])


def test_a_drafter_that_sees_is_right_and_a_blind_one_is_not() -> None:
    given, expected = request("one", "public")
    settings: Any = {"max_new_tokens": ROOM, "do_sample": False}
    calls = {}
    for sees in ("pixels", "target-features", "nothing"):
        fast = mmspec.accelerate(policy(), "coupled", drafter=toys.openvla(), sees=sees, length=3)
        out = fast.generate(**given, **settings)
        assert torch.equal(out.sequences, expected)
        calls[sees] = out.stats.target_calls
    assert calls["pixels"] == calls["target-features"] == -(-(ROOM - 1) // 4) < calls["nothing"]


def test_a_drafter_may_see_fewer_features() -> None:
    """A picture's features are thinned where they lie, behind the first token."""
    given, expected = request("ragged", "marked")
    seen: Any = {"sees": "target-features", "compressor": "average-pool", "length": 3}
    fast = mmspec.accelerate(policy(), "coupled", drafter=toys.openvla(), **seen)
    out = fast.generate(**given, max_new_tokens=ROOM, do_sample=False)
    assert torch.equal(out.sequences, expected)


@pytest.mark.parametrize("recipe", ["plain", "prompt-lookup", "coupled"])
def test_a_second_turn_goes_on_from_the_cache(recipe: str) -> None:
    given, _ = request("one", "marked")
    settings: Any = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    more = torch.randint(3, WORDS, (1, 3))
    ours, theirs = bound(recipe, ""), policy()
    found: list[Tensor] = []
    for side in (ours, theirs):
        first = side.generate(**given, **settings)
        ids = torch.cat((first.sequences, more), 1)
        second = side.generate(input_ids=ids, past_key_values=first.past_key_values, **settings)
        found.append(second.sequences)
    assert torch.equal(*found)
    assert found[0].shape[1] == 6 + PATCHES + 4 + 3 + 4


def test_sampling_with_a_seed_is_plain_decoding() -> None:
    given, _ = request("ragged", "marked")
    settings: Any = {"max_new_tokens": ROOM, "do_sample": True, "temperature": 1.0, "seed": 11}
    plain = mmspec.decode_plain(policy(), **given, **settings).sequences
    for shape in ("chain", "tree"):
        assert torch.equal(bound("coupled", shape).generate(**given, **settings).sequences, plain)


def test_one_tower_is_read_the_same() -> None:
    model = toys.prismatic()
    ids = torch.randint(3, WORDS, (2, 5))
    given = {"input_ids": ids, "pixel_values": torch.randn(2, 3, SIDE, SIDE)}
    expected = model.generate(**given, max_new_tokens=ROOM, do_sample=False)
    fast = mmspec.accelerate(model, "prompt-lookup")
    out = fast.generate(**given, max_new_tokens=ROOM, do_sample=False)
    assert torch.equal(out.sequences, expected)


def test_folders_load_without_code_of_theirs(tmp_path: Path) -> None:
    for name, model in (("policy", policy()), ("one", toys.prismatic())):
        model.save_pretrained(tmp_path / name)
        again = load_causal(tmp_path / name)
        assert type(again) is type(model)
        for ours, theirs in zip(again.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        assert type(skeleton(str(tmp_path / name))) is type(model)


def test_a_prompt_with_image_ids_and_no_picture_is_refused() -> None:
    given, _ = request("one", "marked")
    fast = bound("plain", "")
    with pytest.raises(ValueError, match="no image was given"):
        fast.generate(input_ids=given["input_ids"], max_new_tokens=2)
