"""The catalogue is read without loading models, and its entries are consistent."""

from __future__ import annotations

from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mmspec import recipes, registry, zoo
from mmspec.modality import Modality, Source, parse_settings
from tests.forks import run_forked

MODALITIES = [one for one in registry.modalities().values() if one.zoo]
each = pytest.mark.parametrize("modality", MODALITIES, ids=lambda one: one.name)


LIGHT = (
    "from mmspec import registry; registry.modalities()",
    "from mmspec import registry; assert registry.find_modality('zoo:mar').name == 'mar'",
    "from mmspec import zoo; assert all(zoo.is_present(name) for name in zoo.names())",
    "from mmspec.cli import main; main(['zoo', 'list'])",
)


def test_the_catalogue_is_read_without_torch() -> None:
    check = "assert not {'torch', 'transformers', 'diffusers'} & {*sys.modules}"
    done = run_forked([f"import sys; {code}; {check}" for code in LIGHT])
    assert not [one.err for one in done.values() if one.status]


@each
def test_a_modality_is_complete(modality: Modality) -> None:
    wanted = recipes.get(modality.recipe)
    assert wanted.decodes == modality.decodes
    assert (
        modality.recipe_with_drafter is None
        or recipes.get(modality.recipe_with_drafter).takes_drafter
    )
    assert parse_settings(modality.settings, {}) == modality.settings()
    assert all(field.metadata["help"] for field in fields(modality.settings))


@each
def test_checkpoints_name_each_other_and_their_trainer(modality: Modality) -> None:
    own = {entry.name: entry for entry in modality.zoo}
    for entry in own.values():
        assert zoo.info(entry.name) is entry
        assert zoo.modality(entry.name) is modality
        assert zoo.path(entry.name).name == entry.name
        assert find_spec(entry.trainer) is not None
        assert (entry.target is None) == (entry.kind == "target")
        assert entry.target is None or own[entry.target].kind == "target"
        assert entry.drafter is None or own[entry.drafter].target == entry.name


@each
def test_a_checkpoint_belongs_to_one_modality_by_name_by_folder_and_loaded(
    modality: Modality,
) -> None:
    for entry in modality.zoo:
        assert registry.find_modality(f"zoo:{entry.name}") is modality
        if entry.sees not in ("target-states", "encoder"):  # what it speaks with is its target's
            assert registry.find_modality(zoo.path(entry.name)) is modality
            assert registry.find_modality(zoo.load(entry.name)) is modality


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (Source("org/model"), "vlm"),
        (Source("f", "llava", ("LlavaForConditionalGeneration",)), "vlm"),
        (Source("f", "chameleon", ("ChameleonForConditionalGeneration",)), "vlm"),
        (Source("f", "chameleon", ("ChameleonForImageGeneration",)), "image"),
        (Source("f", "llamagen"), "image"),
        (Source("f", "emu3"), "image"),
        (Source("f", "mar", ("MarForImageGeneration",)), "mar"),
        (Source("f", None, ("FluxPipeline", "DiffusionPipeline")), "diffusion"),
        (Source("f", None, ("FluxTransformer2DModel",)), "diffusion"),
        (Source(object(), None, ("DiTTransformer2DModel", "ModelMixin", "object")), "diffusion"),
        (Source(object(), None, ("object",)), None),
    ],
)
def test_a_model_belongs_to_one_modality_by_what_it_is_made_of(
    source: Source, name: str | None
) -> None:
    owners = [one for one in MODALITIES if one.owns(source)]
    special = [one for one in owners if not one.is_general]
    assert [one.name for one in special or owners] == ([] if name is None else [name])


def test_names_lead_to_folders_and_aliases_too() -> None:
    assert zoo.path("vlm") == zoo.path("llava")
    assert zoo.info("vlm").drafter == "llava-drafter"
    assert zoo.modality("vlm").name == "vlm"
    assert len(set(zoo.names())) == len(zoo.names())


def test_checkpoints_of_other_packages_lie_beside_their_loader(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "stranger.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = zoo.Entry("walk", "A random walk.", "stranger", "stranger")
    kept = MODALITIES[0]
    other = Modality(
        "odd",
        "tokens",
        "plain",
        kept.settings,
        "stranger",
        lambda _: False,
        (entry,),
    )
    monkeypatch.setattr(registry, "modalities", lambda: {"odd": other})
    assert zoo.path("walk") == tmp_path / "checkpoints" / "walk"
    assert not zoo.is_present("walk")


@pytest.mark.parametrize("ask", [zoo.path, zoo.info, zoo.modality, zoo.load, zoo.processor])
def test_an_unknown_name_is_answered_with_the_known_ones(ask: Any) -> None:
    with pytest.raises(ValueError, match=r"'lava' is not in the zoo; did you mean 'llava'\?"):
        ask("lava")
