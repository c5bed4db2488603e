"""Which recipes are offered to a model: those whose needs it meets; of the others the reason."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import mmspec
from mmspec import recipes, registry, zoo
from mmspec.recipe import NEEDS
from tests.cli.running import run

TARGETS = [name for name in zoo.names() if zoo.info(name).target is None]
# Recipes that bind to other models too, but draft or judge what these do not generate or read
UNSUITED = {
    "image tokens": {"gsd", "sjd", "sjd2", "sjd-pac", "sjd-pp", "sjd-pv", "mc-sjd"}
    | {"mc-sjd-gumbel", "zipar"},
    "speech encoder": {"whisper-assisted", "specasr", "specasr-tree"},
}


@cache
def load(name: str) -> tuple[Any, Any]:
    owner = zoo.modality(name)
    return owner, registry.plug(owner).load(f"zoo:{name}")


def accepted(name: str) -> set[str]:
    """The recipes that `accelerate` accepts for a bundled model, with the bundled drafters."""
    owner, model = load(name)
    found = set()
    for recipe in recipes.names(*owner.all_decodes):
        plan = recipes.get(recipe)
        drafter = zoo.drafter_for(f"zoo:{name}", plan) if plan.takes_drafter else None
        if plan.takes_drafter and drafter is None:
            continue
        try:
            mmspec.accelerate(model, recipe, drafter=drafter, modality=owner.name)
        except ValueError:
            continue
        found.add(recipe)
    return found


_MARKS: dict[str, Any] = {"mar": (), "llava": pytest.mark.exhaustive}


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=_MARKS.get(one, pytest.mark.slow)) for one in TARGETS],
)
def test_what_accelerate_accepts_is_offered(name: str) -> None:
    if not zoo.is_present(name):
        pytest.skip(f"needs zoo:{name}")
    owner, _ = load(name)
    unsuited = {one for need, some in UNSUITED.items() if need not in owner.offers for one in some}
    offered = {one for one in recipes.names() if recipes.find_misfit(one, owner) is None}
    assert accepted(name) - offered == accepted(name) & unsuited
    assert not offered & unsuited


@pytest.mark.parametrize("name", recipes.names())
def test_needs_are_documented_and_offered_by_some_modality(name: str) -> None:
    recipe = recipes.get(name)
    assert {*recipe.needs} <= NEEDS.keys()
    owners = [one for one in registry.modalities().values() if not recipes.find_misfit(name, one)]
    assert owners


def test_modalities_offer_documented_things() -> None:
    assert {one for owner in registry.modalities().values() for one in owner.offers} == {*NEEDS}


@pytest.mark.exhaustive
def test_recipes_of_a_modality_are_those_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    fitting = {row["name"] for row in run(capsys, "recipes", "--modality", "vlm")}
    assert not fitting & {"sjd", "gsd", "zipar", "whisper-assisted", "ctc-ssd", "asd"}
    assert {"coupled", "eagle-2", "suffix", "massv"} <= fitting
    rows = {row["name"]: row for row in run(capsys, "recipes", "--modality", "vlm", "--all")}
    assert rows.keys() == {*recipes.names()}
    assert rows["sjd"]["reason"] == "needs image tokens"
    assert rows["asd"]["reason"] == "decodes latents, not tokens"
    assert rows["coupled"]["reason"] is None


@pytest.mark.skipif(not zoo.is_present("whisper"), reason="needs zoo:whisper")
def test_recipes_of_a_model_are_those_that_bind_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["name"]: row for row in run(capsys, "recipes", "--model", "zoo:whisper", "--all")}
    assert rows["whisper-assisted"]["reason"] is None
    assert "CTC head" in rows["ctc-ssd"]["reason"]
    assert "encoder" in rows["swift"]["reason"]


def test_hears_is_an_old_name() -> None:
    plan = recipes.get("plain")
    with pytest.warns(FutureWarning, match="CTC head"):
        old = mmspec.Recipe(plan.architecture, plan.execution, plan.verifier, hears=True)
    assert old.needs == ("CTC head",)
