"""What a command is about: modality, model, recipes, draft models; checked before any is read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mmspec import recipes, registry, zoo
from mmspec.cli.options import PARTS, Choice, dashed, settings_for
from mmspec.modality import Modality, parse_settings
from mmspec.models.folder import check_there
from mmspec.registry import ZOO

ALL = "all"


@dataclass(frozen=True)
class Chosen:
    """Names only; `drafters` are those of the recipes, None where one takes none."""

    model: str
    owner: Modality
    settings: Any  # of the owner
    recipes: tuple[str, ...]
    drafters: Mapping[str, str | None]
    options: Mapping[str, Any]  # parts and knobs of all recipes
    own_options: Mapping[str, Mapping[str, Any]]  # of single recipes, by name
    left_out: Mapping[str, str] = field(default_factory=dict)  # of "all": why
    written: Mapping[str, Path] = field(default_factory=dict)  # files of settings, by option

    @property
    def recipe(self) -> str:
        """The only one. Raises ValueError where there are several."""
        if len(self.recipes) > 1:
            raise ValueError(
                f"--recipe was given {len(self.recipes)} times; give it once, or compare them with "
                "`mmspec bench`"
            )
        return self.recipes[0]


def choose(choice: Choice) -> Chosen:
    """What was chosen. Raises ValueError for whatever does not go together."""
    owner, model = _owner(choice)
    _refuse_foreign(choice, owner, model)
    settings = parse_settings(owner.settings, {**_usual(owner, model), **choice.settings})
    written: dict[str, Path] = {}
    for one in settings_for(owner, choice.command):
        value = choice.settings.get(one.name)
        if one.metadata.get("writes") and value is not None:
            written[dashed(one.name)] = Path(value)
            check_writable(dashed(one.name), Path(value), one.metadata["writes"])
    named = _recipes(choice, owner, model)
    options = _options(choice, named)
    chosen = Chosen(model, owner, settings, named, {}, *options, written=written)
    return _with_drafters(choice, chosen)


def _owner(choice: Choice) -> tuple[Modality, str]:
    """The modality, and the model's name; where no model says it, the recipe does."""
    name, said = choice.model, [one for one in choice.recipe or () if one != ALL]
    if name is not None:
        check_source(name)
    if choice.modality is not None:
        named = choice.modality
        owner = registry.get(named) if name is None else registry.find_modality(name, named)
    elif name is not None and (name.startswith(ZOO) or Path(name).exists()):
        owner = registry.find_modality(name)
    else:
        decodes = recipes.about(said[0])["decodes"] if said else None
        fitting = [one for one in registry.modalities().values() if decodes in (None, one.decodes)]
        owner = max(fitting, key=lambda one: one.is_general)
    if name is None:
        targets = [entry.name for entry in owner.zoo if entry.target is None]
        if not targets:
            raise ValueError(f"modality {owner.name} has no model of its own; give --model")
        name = f"{ZOO}{targets[0]}"
        check_source(name)
    return owner, name


def _usual(owner: Modality, model: str) -> Mapping[str, Any]:
    """The settings of a checkpoint of the zoo, where nothing is said."""
    return zoo.info(model).settings if model.startswith(ZOO) else {}


def _refuse_foreign(choice: Choice, owner: Modality, model: str) -> None:
    """One error for all options that the modality has not got, naming those that it has."""
    own = [one.name for one in settings_for(owner, choice.command)]
    known = [*own, *(one for one in PARTS if one in owner.parts)]
    parts = {name: getattr(choice, name) for name in PARTS}
    given = [*choice.settings, *(name for name, value in parts.items() if value is not None)]
    foreign = [dashed(name) for name in given if name not in known]
    if foreign:
        raise ValueError(
            f"{', '.join(foreign)}: no option of `mmspec {choice.command}` for {model}, whose "
            f"modality is {owner.name}; it has {', '.join(map(dashed, known))}"
        )


def _recipes(choice: Choice, owner: Modality, model: str) -> tuple[str, ...]:
    """Those that were named, the usual one, or all of the modality's."""
    said = [name for name in choice.recipe or () if name != ALL]
    for name in said:
        recipes.check_decodes(
            recipes.get(name), owner.all_decodes, model, owner.unsupported_options
        )
    if choice.recipe and ALL in choice.recipe:
        every = [(name, recipes.get(name)) for name in recipes.names(*owner.all_decodes)]
        return tuple(
            name for name, plan in every if not set(owner.unsupported_options) & set(plan.options)
        )
    if said:
        return tuple(dict.fromkeys(said))
    usual = zoo.info(model).recipe if model.startswith(ZOO) else None
    if usual is not None and choice.drafter is None:
        return (usual,)
    if owner.recipe_with_drafter is not None:
        plan = recipes.get(owner.recipe_with_drafter)
        if choice.drafter or zoo.drafter_for(model, plan):
            return (owner.recipe_with_drafter,)
    return (owner.recipe,)


def _options(
    choice: Choice, named: Sequence[str]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Parts and knobs of all recipes, and those of single ones: `--set RECIPE.NAME=VALUE`."""
    every, own = dict[str, Any](), dict[str, dict[str, Any]]()
    for key, value in choice.options().items():
        recipe, dot, name = key.rpartition(".")
        if not dot:
            every[key] = value
        elif recipe in named:
            own.setdefault(recipe, {})[name] = value
        else:
            raise ValueError(
                f"--set {key}={value} is of recipe {recipe!r}, which is not asked for; those that "
                f"are: {', '.join(named)}"
            )
    return every, own


def _with_drafters(choice: Choice, chosen: Chosen) -> Chosen:
    """The draft model of each recipe: the one that was named, or the zoo's own."""
    takers = {name: plan for name in chosen.recipes if (plan := recipes.get(name)).takes_drafter}
    if choice.drafter is not None:
        check_source(choice.drafter)
        if not takers:
            takes = ", ".join(chosen.recipes)
            raise ValueError(f"recipe {takes} takes no draft model; drop --drafter")
        kinds = {plan.draft_model: name for name, plan in takers.items()}
        if len(kinds) > 1:
            raise ValueError(
                f"{' and '.join(kinds.values())} take draft models of different kinds, and "
                f"--drafter {choice.drafter} is one of them; ask for recipes of its kind alone "
                "(--recipe), or drop --drafter where the zoo has one for each"
            )
    found = dict[str, str | None].fromkeys(chosen.recipes)
    left_out: dict[str, str] = {}
    for name, plan in takers.items():
        found[name] = choice.drafter or zoo.drafter_for(chosen.model, plan)
        if found[name] is None:
            needs = f"recipe {name!r} needs {plan.wanted}"
            left_out[name] = f"{needs}; give --drafter DIR or zoo:NAME"
    if left_out and not (choice.recipe and ALL in choice.recipe):
        raise ValueError(next(iter(left_out.values())))
    left = tuple(name for name in chosen.recipes if name not in left_out)
    return replace(chosen, recipes=left, drafters=found, left_out=left_out)


def check_source(name: str) -> None:
    """Refuse a model that is not there. Raises ValueError; a name may still be of a hub."""
    if name.startswith(ZOO):
        own = zoo.info(name).name
        if not zoo.is_present(own):
            raise ValueError(
                f"{name} is not there ({zoo.path(own)}); train it with `mmspec zoo train {own}`"
            )
    else:
        check_there(name)


def check_file(option: str, file: Path, owner: Modality) -> None:
    """Refuse a file that could not be written once its content is there. Raises ValueError."""
    if not owner.files:
        raise ValueError(f"{option} {file}: modality {owner.name} writes no files; drop {option}")
    check_writable(option, file, owner.files)


def check_writable(option: str, file: Path, endings: Sequence[str] = ()) -> None:
    """Refuse a folder, a place where nothing can be written, and unknown endings."""
    if file.is_dir():
        raise ValueError(f"{file} is a folder; give {option} a file in it")
    if not file.parent.is_dir():
        raise ValueError(f"there is no folder {file.parent}; make it, or choose another {option}")
    place = file if file.exists() else file.parent
    if not os.access(place, os.W_OK):
        raise ValueError(f"{place} cannot be written to; choose another {option}")
    if endings and file.suffix.lower() not in endings:
        raise ValueError(
            f"{option} {file}: files of type {file.suffix or 'none'} cannot be written; choose "
            f"one of {', '.join(endings)}"
        )


def check_apart(files: Mapping[str, Path | None]) -> None:
    """Refuse two options that name one file, which the second would write over. By option."""
    found: dict[Path, str] = {}
    for option, file in files.items():
        if file is not None and found.setdefault(file.resolve(), option) != option:
            raise ValueError(
                f"{found[file.resolve()]} and {option} both write {file}; give each its own file"
            )


def check_files(out: Path | None, plot: Path | None, endings: Sequence[str] = (".csv",)) -> None:
    """Whatever could only be found out once everything is measured. Raises ValueError."""
    if out is not None:
        check_writable("--out", out, endings)
    if plot is None:
        return
    check_writable("--plot", plot, (".svg", ".png", ".pdf"))
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib; install mmspec[plots]")
