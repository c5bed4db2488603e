"""Options of relaxed recipes: exact at one end, further from the target towards the other."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

import mmspec
from mmspec import recipes
from mmspec.bench.studies.frontier import LATENT_RECIPES
from mmspec.bench.studies.sweep import OPTIONS, Sweep, flatten, sweep
from mmspec.cli.options import ModelOptions
from mmspec.cli.studies import _list_relaxed
from mmspec.modalities.image import tiny_models as toys
from mmspec.modalities.image.measures import of_requests, toy_distance
from tests.covering import exhaustive

IN_VERIFIER = ("gsd", "lantern", "lantern-pp", "cool-sd", "lenience")


def distance(name: str, value: float) -> float | None:
    return toy_distance(name, OPTIONS[name].parts(value))


@pytest.mark.parametrize("name", exhaustive(IN_VERIFIER, [*IN_VERIFIER][::2]))
def test_options_begin_exact_and_move_away(name: str) -> None:
    values = OPTIONS[name].values
    least, most = distance(name, values[0]), distance(name, values[-1])
    assert least is None or least < 1e-12
    assert most is not None
    assert most > 0.005


def test_what_is_lost_outside_the_verifier_has_no_enumerated_distance() -> None:
    assert distance("sjd-pp", 1.0) is None
    assert toys.distance(recipes.get("sjd")) is None
    assert toys.distance(recipes.get("zipar")) is None


def measured(*chosen: str) -> Sweep:
    target, small = toys.tiny_model(), toys.tiny_model(layers=1, seed=1)

    def accelerated(name: str, **parts: Any) -> Any:
        drafter = small if recipes.get(name).takes_drafter else None
        return mmspec.accelerate(target, name, drafter=drafter, **parts)

    work = of_requests(target, [{**toys.class_request(1), **toys.SETTINGS}])
    return sweep(chosen, accelerated, work, repeats=1)


@pytest.mark.exhaustive
def test_points_are_written_and_drawn(tmp_path: Path) -> None:
    found = measured("cool-sd", "gsd")
    wanted = [(name, value) for name in ("cool-sd", "gsd") for value in OPTIONS[name].values]
    assert [(point.recipe, point.value) for point in found.points] == wanted
    assert len(found.plain) == 2
    assert found.points[0].row.distance == pytest.approx(0, abs=1e-6)
    found.write_csv(tmp_path / "points.csv")
    with (tmp_path / "points.csv").open() as opened:
        lines = list(csv.DictReader(opened))
    assert [float(line["value"]) for line in lines] == [value for _, value in wanted]
    assert float(lines[0]["log likelihood"]) < 0
    pytest.importorskip("matplotlib")
    from mmspec.bench.plots import plot_relaxations

    plot_relaxations(found, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert "<svg" in drawn
    plot_relaxations(found, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == drawn


def test_the_recipes_of_a_model_are_those_that_decode_what_it_does_and_fit() -> None:
    policy, image = (ModelOptions(model=f"zoo:{one}", command="bench") for one in ("vla", "image"))
    assert _list_relaxed(policy) == ["hold-last-tolerance", "spec-vla", "oft-draft-tolerance"]
    assert {"gsd", "lantern", "lenience"} <= {*_list_relaxed(image)}
    text = ModelOptions(model="zoo:llava", command="bench")
    assert _list_relaxed(text) == ["cool-sd", "lenience"]  # no recipe of image tokens
    diffusion = ModelOptions(model="zoo:diffusion", command="bench")
    assert _list_relaxed(diffusion) == list(LATENT_RECIPES)
    with pytest.raises(ValueError, match="no relaxed recipe with a parameter decodes patches"):
        _list_relaxed(ModelOptions(model="zoo:mar", command="bench"))


def test_columns_of_a_modality_are_numbers() -> None:
    assert flatten({"success": 0.5, "McNemar": {"p": 1.0}}) == {"success": 0.5, "McNemar p": 1.0}


def test_a_recipe_without_an_option_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sjd: no parameter to sweep; recipes with one: gsd"):
        measured("sjd")
