"""Every file in the folder is a recipe: described, consistent, and running."""

from __future__ import annotations

import importlib
import pkgutil
import re
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

import mmspec
from mmspec import recipes
from mmspec.codes.codebook import Codebook
from mmspec.draft import Round, Verifier
from mmspec.recipe import CTC_HEAD, Deferred, Kit, Recipe, resolve
from mmspec.verifiers.coupled import Coupled
from tests import toys
from tests.covering import exhaustive
from tests.partners import partner

ALL = recipes.names()
NAMES = [
    name for name in recipes.names("tokens") if CTC_HEAD not in recipes.get(name).needs
]  # have their own
KINDS = ("tokens", "latents", "patches", "frames", "actions")
ROOM = 10


def module(name: str) -> ModuleType:
    return importlib.import_module(f"mmspec.recipes.{name.replace('-', '_')}")


def bound(name: str, family: str = "llava") -> mmspec.Accelerated:
    drafter = partner(name, family)
    model, options = toys.model(family), dict[str, Any]()
    if "codebook" in recipes.get(name).options:  # this model draws nothing and has none
        rows = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
        options["codebook"] = Codebook.from_offset(rows, 10, model.config.text_config.vocab_size)
    return mmspec.accelerate(model, name, drafter=drafter, **options)


def test_the_folder_is_the_registry() -> None:
    files = {info.name.replace("_", "-") for info in pkgutil.iter_modules(recipes.__path__)}
    assert set(ALL) == files
    assert list(ALL) == sorted(ALL)
    assert set(ALL) == {name for kind in KINDS for name in recipes.names(kind)}
    assert {"plain", "coupled", "prompt-lookup", "spd-mllm"} <= files


@pytest.mark.parametrize("name", ALL)
def test_a_recipe_says_what_it_is(name: str) -> None:
    text = module(name).__doc__ or ""
    summary, blank, *rest = text.splitlines()
    assert summary == recipes.summary(name)
    assert ": " in summary
    assert summary.endswith(".")
    assert len(summary) <= 110
    assert not blank
    body = " ".join(rest)
    recipe = recipes.get(name)
    says_exact = bool(re.search(r"\b[Ee]xact\b|\b[Ll]ossless\b", body))
    says_lossy = bool(re.search(r"\b[Ll]ossy\b", body))
    assert says_exact or says_lossy
    assert says_exact if recipe.exact else says_lossy
    if not name.endswith("plain"):
        assert recipe.paper
        assert re.search(r"\d{4}", recipe.paper)


@pytest.mark.parametrize("name", ALL)
def test_a_recipe_has_its_five_parts(name: str) -> None:
    recipe = recipes.get(name)
    assert isinstance(recipe, Recipe)
    assert recipe.name == name
    assert module(name).RECIPE.name == ""  # the file name is the key
    axes = recipe.axes()
    assert len(axes) == 5
    for axis, part in axes.items():
        assert part.strip(), axis
        assert "0x" not in part  # no address where a name belongs
        assert "lambda" not in part


def is_proved(name: str, how: str) -> bool:
    """Token by token, on ragged rows of this very model: `test_every_exact_recipe`, `..._coupled`.

    What is proved there is run here only by `-m exhaustive`, and so are greedy runs of lossy ones.
    """
    plan = recipes.get(name)
    return how == "greedy" or (plan.exact and isinstance(plan.verifier, Coupled))


WAYS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 1.0, "seed": 1}}
RUNS = [
    pytest.param(
        *(name, settings),
        id=f"{name}-{how}",
        marks=pytest.mark.exhaustive if is_proved(name, how) else (),
    )
    for name in NAMES
    for how, settings in WAYS.items()
]


@pytest.mark.parametrize(("name", "settings"), RUNS)
def test_a_recipe_runs(name: str, settings: dict[str, Any]) -> None:
    fast, request = bound(name), toys.inputs("llava", batch=2, ragged=True)
    out = fast.generate(**request, max_new_tokens=ROOM, **settings)
    assert out.stats.fallback is None
    assert out.stats.recipe == name
    assert out.stats.exact == fast.recipe.exact
    assert out.stats.exact or not recipes.get(name).exact  # what is made may lose less than said
    assert out.stats.num_new_tokens == 2 * ROOM
    if not settings and out.stats.exact:
        expected = fast.model.generate(**request, max_new_tokens=ROOM, do_sample=False)
        assert torch.equal(out.sequences, expected)
    if settings and isinstance(fast.recipe.verifier, Coupled):
        plain = mmspec.decode_plain(fast.model, **request, max_new_tokens=ROOM, **settings)
        assert torch.equal(out.sequences, plain.sequences)


# Their drafts depend on the row's noise, also greedily, or on other rows and earlier requests.
MIXED = (
    "ensemble",
    "gsd",
    "mc-sjd",
    "mc-sjd-gumbel",
    "sjd",
    "sjd-pac",
    "sjd-pp",
    "sjd-pv",
    "sjd2",
    "ssd",
)
SHARED = ("osd", "pipeinfer", "pool", "pool-lookup", "token-recycling", "ugsd", "vvs")
AHEAD = ("pearl", "hippo", "parallelvlm")
ONE_OF_EACH = ("pearl", "eagle-3", "std", "suffix")


def rounds_per_row(fast: mmspec.Accelerated, request: dict[str, Any]) -> list[int]:
    """Rounds with a target forward until each row ends."""
    counts = [0] * len(request["input_ids"])

    def count(one: Round) -> None:
        for row, line in enumerate(one.tokens):
            counts[row] += bool(line) and one.calls > 0

    fast.generate(**request, max_new_tokens=2 * ROOM, do_sample=False, on_round=count)
    return counts


@pytest.mark.parametrize(
    "name", exhaustive([n for n in NAMES if n not in (*MIXED, *SHARED)], ONE_OF_EACH)
)
def test_a_row_is_accepted_as_much_in_any_batch(name: str) -> None:
    """Rows that differ: none waits for, or loses its draft to, another one."""
    fast, request = bound(name), toys.inputs("llava", seed=2, batch=3)
    alone = [rounds_per_row(fast, toys.alone(request, row))[0] for row in range(3)]
    assert rounds_per_row(fast, request) == alone
    if name in AHEAD:
        assert len(set(alone)) > 1


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_prints_itself(name: str) -> None:
    fast = bound(name)
    assert name in repr(fast)
    assert fast.sees in repr(fast)


def test_a_deferred_verifier_says_what_is_known_of_it() -> None:
    recipe = recipes.get("coupled")
    kit = Kit(None, None, recipe.execution, "nothing")
    for lossless in (False, True):
        deferred = Deferred[Verifier](lambda kit: Coupled(), "made of the kit", lossless)
        unbound = replace(recipe, verifier=deferred)
        assert unbound.exact is lossless
        assert unbound.axes()["verification optimisation"] == "made of the kit"
        assert not isinstance(deferred, Verifier)
        assert resolve(unbound.verifier, kit) == resolve(recipe.verifier, kit) == Coupled()


def test_a_name_that_is_nearly_right() -> None:
    with pytest.raises(ValueError, match="no recipe 'spec-infr'; did you mean 'spec-infer'"):
        recipes.get("spec-infr")
    with pytest.raises(ValueError, match=r"no recipe \[\]; known recipes: .*coupled"):
        recipes.get([])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"decodes=\[\] is not a name"):
        recipes.names([])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"no recipe 'zzz'; known recipes: .*coupled"):
        recipes.get("zzz")
