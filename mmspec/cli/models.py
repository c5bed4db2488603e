"""Resolve the modality, model, recipes and draft models of a command, and load them.

Everything is checked before any weights are read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from mmspec import recipes, registry, zoo
from mmspec.accelerated import Accelerated
from mmspec.api import accelerate
from mmspec.cli.options import PARTS, ModelOptions, flag, select_settings
from mmspec.cli.output import show_status, silence_libraries
from mmspec.cli.placement import check_placement, place
from mmspec.draft_models import find_owners
from mmspec.drafters.shapes import shape_of
from mmspec.modality import Formatter, Modality, parse_settings
from mmspec.models.folder import check_folder_exists
from mmspec.models.own_heads import find_weights
from mmspec.recipe import Recipe
from mmspec.registry import ZOO

ALL = "all"


@dataclass(frozen=True)
class Selected:
    """The names that the options resolve to; nothing is loaded."""

    model: str
    owner: Modality
    settings: Any  # of the owner
    recipes: tuple[str, ...]
    drafters: Mapping[str, str | None]  # by recipe; None = it takes none
    options: Mapping[str, Any]  # of all recipes
    own_options: Mapping[str, Mapping[str, Any]]  # of single recipes, by name
    left_out: Mapping[str, str] = field(default_factory=dict)  # of `--recipe all`: the reasons
    output_files: Mapping[str, Path] = field(default_factory=dict)  # by the option that names one

    @property
    def recipe(self) -> str:
        """The only recipe. Raises ValueError if there are several."""
        if len(self.recipes) > 1:
            raise ValueError(
                f"--recipe was given {len(self.recipes)} times; give it once, or compare them with "
                "`mmspec bench`"
            )
        return self.recipes[0]


def select(options: ModelOptions) -> Selected:
    """Resolve the options of a command. Raises ValueError for options that do not fit together."""
    owner, model = _select_model(options)
    _check_options(options, owner, model)
    usual = zoo.info(model).settings if model.startswith(ZOO) else {}
    settings = parse_settings(owner.settings, {**usual, **options.settings})
    _check_inputs(options, owner, model)
    files: dict[str, Path] = {}
    for one in select_settings(owner, options.command):
        value = options.settings.get(one.name)
        if one.metadata.get("writes") and value is not None:
            files[flag(one.name)] = Path(value)
            check_writable(flag(one.name), Path(value), one.metadata["writes"])
    names, left_out = _select_recipes(options, owner, model)
    common, own = _split_keywords(options, names)
    usual_parts = {} if options.recipe else owner.default_parts(names[0], common)
    if usual_parts:
        own[names[0]] = {**usual_parts, **own.get(names[0], {})}
    if owner.decodes == "tokens":
        for given in (common, *own.values()):
            shape_of(None, given.get("tree"), given.get("length"))  # refuses unknown names, files
    selected = Selected(model, owner, settings, names, {}, common, own, left_out, files)
    return _add_drafters(options, selected)


def _select_model(options: ModelOptions) -> tuple[Modality, str]:
    """The modality and the model's name; without --model the recipe decides the modality."""
    name, names = options.model, [one for one in options.recipe or () if one != ALL]
    if name is not None:
        check_source(name)
    if options.modality is not None:
        given = options.modality
        owner = registry.get(given) if name is None else registry.find_modality(name, given)
    elif name is not None and (name.startswith(ZOO) or Path(name).exists()):
        owner = registry.find_modality(name)
    else:
        decodes = recipes.describe(names[0])["decodes"] if names else None
        fitting = [one for one in registry.modalities().values() if decodes in (None, one.decodes)]
        owner = max(fitting, key=lambda one: one.is_general)
    if name is None:
        targets = [entry.name for entry in owner.zoo if entry.target is None]
        for one in select_settings(owner, options.command):
            takers = one.metadata.get("checkpoints")
            if takers and options.settings.get(one.name) is not None:
                targets = list(takers)
        if not targets:
            raise ValueError(f"modality {owner.name} has no bundled model; give --model")
        name = f"{ZOO}{targets[0]}"
        check_source(name)
    return owner, name


def _check_options(options: ModelOptions, owner: Modality, model: str) -> None:
    """Refuse options that the modality does not have. Raises one ValueError naming its own."""
    own = [one.name for one in select_settings(owner, options.command)]
    check_placement(options.placed, owner, model)
    known = [*own, *(one for one in PARTS if one in owner.parts)]
    parts = {name: getattr(options, name) for name in PARTS}
    given = [*options.settings, *(name for name, value in parts.items() if value is not None)]
    foreign = [flag(name) for name in given if name not in known]
    if foreign:
        raise ValueError(
            f"{', '.join(foreign)}: no option of `mmspec {options.command}` for {model}, whose "
            f"modality is {owner.name}; it has {', '.join(map(flag, known))}"
        )


def _check_inputs(options: ModelOptions, owner: Modality, model: str) -> None:
    """Refuse missing files, and those that a bundled model does not read. Raises ValueError."""
    for one in select_settings(owner, options.command):
        value, what = options.settings.get(one.name), one.metadata.get("reads")
        takers = one.metadata.get("checkpoints")
        if what is None or value is None:
            continue
        if takers and model.startswith(ZOO) and zoo.info(model).name not in takers:
            raise ValueError(
                f"{model} reads no {what}; drop {flag(one.name)}, or choose a model that does, "
                f"such as {ZOO}{takers[0]}"
            )
        if not value.startswith(ZOO) and not Path(value).exists():
            raise ValueError(f"there is no {what} {value}; give {flag(one.name)} another file")


def check_prompts(owner: Modality, prompts: Sequence[str]) -> None:
    """Refuse an empty prompt where nothing replaces it. Raises ValueError."""
    replaced = any(one.metadata.get("replaces_prompt") for one in fields(owner.settings))
    if not replaced and not all(one.strip() for one in prompts):
        raise ValueError("the prompt is empty; give --prompt some text")


def _select_recipes(
    options: ModelOptions, owner: Modality, model: str
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The recipes that are named, the default one, or all that fit; with the others' reasons."""
    names = [name for name in options.recipe or () if name != ALL]
    for name in names:
        plan = recipes.get(name)
        recipes.check_decodes(plan, owner.all_decodes, model, owner.unsupported_options)
    if options.recipe and ALL in options.recipe:
        every = recipes.names(*owner.all_decodes)
        misfits = {name: recipes.find_misfit(name, owner) for name in every}
        left_out = {
            name: reason for name, reason in misfits.items() if reason and name not in names
        }
        return tuple(name for name in every if name not in left_out), left_out
    if names:
        return tuple(dict.fromkeys(names)), {}
    return (_default_recipe(options, owner, model),), {}


def _default_recipe(options: ModelOptions, owner: Modality, model: str) -> str:
    """The recipe of the bundled model or of the modality; one that takes the --drafter given."""
    usual = zoo.info(model).recipe if model.startswith(ZOO) else None
    if usual is not None and options.drafter is None:
        return usual
    is_own = options.drafter is None and not model.startswith(ZOO) and find_weights(model)
    if is_own and owner.recipe_of_checkpoint is not None:
        return owner.recipe_of_checkpoint
    if owner.recipe_with_drafter is None:
        return owner.recipe
    plan = recipes.get(owner.recipe_with_drafter)
    if options.drafter is None:
        return owner.recipe_with_drafter if zoo.drafter_for(model, plan) else owner.recipe
    folder = Path(options.drafter)
    if folder.is_dir() and not find_owners(plan.draft_model, folder):
        for name in recipes.names(*owner.all_decodes):
            fits = recipes.find_misfit(name, owner) is None
            if fits and find_owners(recipes.get(name).draft_model, folder):
                return name
    return owner.recipe_with_drafter


def _split_keywords(
    options: ModelOptions, names: Sequence[str]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Parts and options of all recipes, and those of single ones: `--set RECIPE.NAME=VALUE`."""
    common, own = dict[str, Any](), dict[str, dict[str, Any]]()
    for key, value in options.keywords().items():
        recipe, dot, name = key.rpartition(".")
        if not dot:
            common[key] = value
        elif recipe in names:
            own.setdefault(recipe, {})[name] = value
        else:
            raise ValueError(
                f"--set {key}={value} is of recipe {recipe!r}, which is not selected; selected: "
                f"{', '.join(names)}"
            )
    return common, own


def _is_taken(plan: Recipe, drafter: str) -> bool:
    """Whether a recipe takes what a folder holds; what a hub name holds is seen when it is read."""
    folder = zoo.path(drafter.removeprefix(ZOO)) if drafter.startswith(ZOO) else Path(drafter)
    return not folder.is_dir() or any(kind.owns(folder) for kind in plan.draft_model)


def _add_drafters(options: ModelOptions, selected: Selected) -> Selected:
    """Add the draft model of each recipe: --drafter, or the bundled one for the model."""
    takers = {name: plan for name in selected.recipes if (plan := recipes.get(name)).takes_drafter}
    if options.drafter is not None:
        check_source(options.drafter)
        if not takers:
            takes = ", ".join(selected.recipes)
            raise ValueError(f"recipe {takes} takes no draft model; drop --drafter")
    is_all = bool(options.recipe and ALL in options.recipe)
    found = dict[str, str | None].fromkeys(selected.recipes)
    missing = {
        name: f"{plan.drafter_description} is needed, which --drafter {options.drafter} is not"
        for name, plan in takers.items()
        if options.drafter is not None and not _is_taken(plan, options.drafter)
    }
    if missing and not is_all and len(takers) > 1:
        raise ValueError(
            f"{' and '.join(missing)} {'take' if len(missing) > 1 else 'takes'} draft models of "
            f"another kind than --drafter {options.drafter}; give recipes of its kind alone "
            "(--recipe), or drop --drafter where the zoo has one for each"
        )
    if not is_all:  # of a single recipe, loading says what the folder holds
        missing.clear()
    for name, plan in takers.items():
        if name in missing:
            continue
        found[name] = options.drafter or zoo.drafter_for(selected.model, plan)
        if found[name] is None:
            needs = f"recipe {name!r} needs {plan.drafter_description}"
            missing[name] = f"{needs}; give --drafter DIR or zoo:NAME"
    if missing and not is_all:
        raise ValueError(next(iter(missing.values())))
    names = tuple(name for name in selected.recipes if name not in missing)
    left_out = {**selected.left_out, **missing}
    return replace(selected, recipes=names, drafters=found, left_out=left_out)


@dataclass(frozen=True)
class LoadedModels:
    """A target with its formatter, and the draft models of the selected recipes."""

    selection: Selected
    model: Any
    formatter: Formatter
    drafters: Mapping[str, Any]  # by name

    def accelerate(self, recipe: str, **parts: Any) -> Accelerated:
        """The model under a recipe, with the options of the command line and further `parts`."""
        selection = self.selection
        name = selection.drafters.get(recipe)
        drafter = None if name is None else self.drafters[name]
        parts = {**selection.options, **selection.own_options.get(recipe, {}), **parts}
        modality = selection.owner.name
        return accelerate(self.model, recipe, drafter=drafter, modality=modality, **parts)

    def accelerate_plain(self) -> Accelerated:
        """The model under the recipe of plain decoding."""
        recipe, parts = self.selection.owner.plain
        return accelerate(self.model, recipe, modality=self.selection.owner.name, **parts)

    def call(self, fast: Accelerated, request: Mapping[str, Any], seed: int) -> Any:
        """The output of `Modality.command_call`; default: of the first call of the session."""
        call = self.selection.owner.command_call or fast.calls[0]
        return getattr(fast, call)(**request, seed=seed)


def load(options: ModelOptions, selected: Selected) -> LoadedModels:
    """Load the target and its draft models. Raises ValueError for what cannot be read."""
    set_threads(options.threads, selected.model)
    keywords = {"trust_remote_code": options.trust_remote_code}
    plug, formatting = registry.plug(selected.owner), registry.formatting(selected.owner)
    silence_libraries()
    names = tuple(filter(None, dict.fromkeys(selected.drafters.values())))
    target, small = place(options.placed, selected.model, names)
    with show_status(f"loading {selected.model}", options.json):
        model = plug.load(selected.model, **target, **keywords)
        formatter = formatting.formatter(selected.model, model, selected.settings, **keywords)
    drafters: dict[str, Any] = {}
    for name in names:
        with show_status(f"loading {name}", options.json):
            drafters[name] = formatting.load_drafter(model, name, **small, **keywords)
    return LoadedModels(selected, model, formatter, drafters)


def load_models(
    model: str | None,
    modality: str | None,
    drafter: str | None,
    recipes: Sequence[str],
    seed: int = 0,
    overrides: list[str] | None = None,
    **settings: Any,
) -> LoadedModels:
    """Load models for a script; settings that are None keep their default.

    Raises ValueError as `load`.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    names = list(recipes)
    options = ModelOptions(
        model, modality, drafter, names, overrides=overrides, seed=seed, settings=given
    )
    return load(options, select(options))


def set_threads(count: int | None, model: str = "") -> None:
    """Set the number of processor threads; default: one for bundled models, else torch's own.

    Bundled models are too small for several threads.
    """
    if count is None and model.startswith(ZOO):
        count = 1
    if count is not None:
        torch.set_num_threads(count)


def check_source(name: str) -> None:
    """Refuse a missing model. Raises ValueError; a name may still be one of the hub."""
    if name.startswith(ZOO):
        own = zoo.info(name).name
        if not zoo.is_present(own):
            raise ValueError(
                f"{name} is not there ({zoo.path(own)}); train it with `mmspec zoo train {own}`"
            )
        return
    check_folder_exists(name)
    if Path(name).is_dir() and not any(Path(name).glob("*.json")):
        raise ValueError(f"{name} holds no model; give a folder that save_pretrained wrote")


def check_file(option: str, file: Path, owner: Modality) -> None:
    """Refuse an output file that the modality could not write. Raises ValueError."""
    if not owner.files:
        raise ValueError(f"{option} {file}: modality {owner.name} writes no files; drop {option}")
    check_writable(option, file, owner.files)


def check_writable(option: str, file: Path, endings: Sequence[str] = ()) -> None:
    """Refuse a folder, a read-only place and unknown endings. Raises ValueError."""
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


def check_distinct(files: Mapping[str, Path | None]) -> None:
    """Refuse two options that name one file, by option. Raises ValueError."""
    found: dict[Path, str] = {}
    for option, file in files.items():
        if file is not None and found.setdefault(file.resolve(), option) != option:
            raise ValueError(
                f"{found[file.resolve()]} and {option} both write {file}; give each its own file"
            )


def check_files(out: Path | None, plot: Path | None, endings: Sequence[str] = (".csv",)) -> None:
    """Refuse what would fail only after all is measured. Raises ValueError."""
    if out is not None:
        check_writable("--out", out, endings)
    if plot is None:
        return
    check_writable("--plot", plot, (".svg", ".png", ".pdf"))
    if find_spec("matplotlib") is None:
        raise ValueError("plots need matplotlib; install mmspec[plots]")
