"""Models of transformers that read pictures are policies once their configuration says so."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

import mmspec
from mmspec import registry
from mmspec.codes.actions import ActionCodes, ActionSpace
from mmspec.drafters.neural.action_slots import ACTION_SLOTS
from mmspec.drafters.neural.feature_head import FEATURE_HEAD
from mmspec.modalities.common.families import make_reader
from mmspec.trees import Tree
from tests import toys
from tests.covering import covering
from tests.partners import noisy
from tests.toys.configs import VOCAB, WORDS
from tests.toys.prismatic import SPAN

BINS = 64
FAMILIES = ("paligemma", "llava")
CODES = ActionCodes(WORDS.stop, BINS)
SPACE = ActionSpace.from_statistics(SPAN, CODES)
SAID = {  # in a configuration: rows of the table behind the words are no actions
    "norm_stats": {"toy": {"action": SPAN}},
    "n_action_bins": BINS,
    "pad_to_multiple_of": VOCAB - WORDS.stop,
}


def set_config(model: Any, **facts: Any) -> Any:
    """The model with the action tokens in its configuration."""
    model.config.update({**SAID, **facts})
    return model


@cache
def policy(family: str) -> Any:
    return set_config(toys.model(family))


@cache
def make_request(family: str, batch: int) -> tuple[dict[str, Tensor], Tensor]:
    """Requests, and what the model says by itself where only actions may be said."""
    request = toys.inputs(family, batch=batch, ragged=batch > 1)
    allowed = list(range(CODES.first, CODES.vocabulary))
    out = policy(family).generate(
        **request,
        max_new_tokens=SPACE.size,
        do_sample=False,
        prefix_allowed_tokens_fn=lambda row, ids: allowed,
    )
    return request, out[:, -SPACE.size :]


def drafter_parts(family: str, recipe: str) -> dict[str, Any]:
    """A drafter for the policy that is right in part, or a head of random weights."""
    if recipe == "coupled":
        return {"drafter": set_config(noisy(family))}
    kind: Any = {"eagle": FEATURE_HEAD, "oft-draft": ACTION_SLOTS}.get(recipe)
    return {} if kind is None else {"drafter": kind.random(make_reader(policy(family)), 0)}


RUNS: list[tuple[str, dict[str, Any]]] = [
    ("prompt-lookup", {}),
    ("coupled", {"length": 3}),
    ("coupled", {"tree": Tree.branching([2, 2, 1])}),
    ("eagle", {}),
    ("oft-draft", {}),
]


@pytest.mark.parametrize(("family", "run", "batch"), covering(FAMILIES, RUNS, (3, 1), strength=1))
def test_actions_are_those_of_the_models_own_tokens(
    family: str, run: tuple[str, dict[str, Any]], batch: int
) -> None:
    recipe, shape = run
    request, tokens = make_request(family, batch)
    assert bool(CODES.contains(tokens).all())
    fast = mmspec.accelerate(policy(family), recipe, **drafter_parts(family, recipe), **shape)
    found = fast.predict_action(**request, robots=list(range(batch)))
    expected = SPACE.unnormalise(SPACE.decode(tokens)).numpy()
    assert np.array_equal(found.reshape(batch, -1), expected)


def test_pictures_change_what_the_robot_does() -> None:
    """Otherwise equality says nothing about them."""
    for family in FAMILIES:
        request, _ = make_request(family, 1)
        fast = mmspec.accelerate(policy(family), "plain")
        seen, other = (fast.predict_action(**one) for one in (request, toys.blind(request)))
        assert not np.array_equal(seen, other)


def test_a_saved_folder_is_a_policy_still(tmp_path: Path) -> None:
    request, tokens = make_request("paligemma", 1)
    policy("paligemma").save_pretrained(tmp_path)
    assert registry.find_modality(tmp_path).name == "vla"
    found = mmspec.accelerate(tmp_path, "prompt-lookup").predict_action(**request)
    assert np.array_equal(found, SPACE.unnormalise(SPACE.decode(tokens))[0].numpy())


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_token_among_actions_is_refused(family: str) -> None:
    """Without the padding of the table the last ids hold it, as in the published vocabularies."""
    model = set_config(toys.model(family), pad_to_multiple_of=0)
    with pytest.raises(ValueError, match="150 is an image token"):
        mmspec.accelerate(model, "plain")
    fast = mmspec.accelerate(toys.model(family), "plain", actions=SPACE, modality="vla")
    request, tokens = make_request(family, 1)
    found = fast.predict_action(**request)
    assert np.array_equal(found, SPACE.unnormalise(SPACE.decode(tokens))[0].numpy())


def test_without_statistics_it_is_no_policy() -> None:
    assert registry.find_modality(toys.model("paligemma")).name == "vlm"
