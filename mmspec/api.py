"""The public functions: `accelerate` a model, decode plainly, load what was saved.

fast = mmspec.accelerate(model, recipe="coupled", drafter=small)
out = fast.generate(**inputs, max_new_tokens=64)
out.sequences, out.stats
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mmspec import recipes, registry, verifiers, zoo
from mmspec.accelerated import Accelerated
from mmspec.draft import Verifier
from mmspec.errors import check_same_kind, format_value, unknown_message
from mmspec.modality import Modality
from mmspec.models.own_heads import find_weights
from mmspec.recipe import Recipe
from mmspec.saving import restore, split_files

log = logging.getLogger("mmspec")
PARTS = ("recipe", "drafter", "verifier", "modality")


def accelerate(
    model: Any,
    recipe: str | Recipe | None = None,
    *,
    drafter: Any = None,
    verifier: Verifier | str | None = None,
    modality: str | None = None,
    **parts: Any,
) -> Accelerated:
    """Make a model generate faster by speculation. The model itself is not changed.

    Args:
        model: A model of transformers, a pipeline of diffusers, or a folder, a hub name or
            "zoo:NAME" (a bundled model) of one.
        recipe: A name (`mmspec.recipes.names()`) or a `Recipe`. Default: the one of the model's
            modality, which differs with and without a draft model.
        drafter: What the recipe drafts with: a smaller model or a trained head, its folder, hub
            name or "zoo:NAME"; or a `Drafter`. A model given as "zoo:NAME" brings its own.
        verifier: A name, such as "coupled" or "rejection", or a `Verifier`, in place of the
            recipe's.
        modality: Which modality to take, where a model has several.
        parts: Parts of the recipe, each where the modality has it. Token models take `tree`
            (branching widths, a `Tree`, or "auto", "dynamic", ...), `length` (draft length, or
            "auto"), `sees` (what the draft model sees of the prompt), `compressor` (of the visual
            tokens it sees) and `kv` (which of the target's keys and values it reads); text and
            vision-language models `compile` (True: blocks are read by compiled graphs); image and
            speech models also take `processor`; pipelines take `window`, `tree`, `max_rows` and
            `sampler`. Options of the recipe itself are given the same way.

    Returns:
        `Accelerated`, of a class with the calls that the model has: `generate`, `transcribe`,
        `synthesize`, `generate_images`, `predict_action`, `__call__`. They take what the model's
        own calls take and return its output with `stats`: `sequences` (B, L + T) of `generate`.

    Raises:
        ValueError: Parts that do not fit, before anything runs: unknown names, different
            vocabularies, proposals that the verifier is biased for, a cache that cannot roll back.

    Example:
        >>> fast = mmspec.accelerate(model, recipe="prompt-lookup")
        >>> out = fast.generate(**inputs, max_new_tokens=128)
        >>> out.sequences, out.stats.mean_acceptance_length
    """
    owner = registry.find_modality(model, modality)
    plug, plan = registry.plug(owner), select_recipe(owner, recipe, drafter is not None)
    source = model
    if isinstance(model, str | Path):
        drafter = zoo.drafter_for(str(model), plan) if drafter is None else drafter
        model = plug.load(model)
    if recipe is None and drafter is None and owner.recipe_of_checkpoint and find_weights(model):
        plan = recipes.get(owner.recipe_of_checkpoint)
    recipes.check_decodes(plan, owner.all_decodes, model, owner.unsupported_options)
    if recipe is None:
        parts = {**parts, **owner.default_parts(plan.name, parts)}
    _check_names(parts, owner, plan)
    given = {name: value for name, value in parts.items() if value is not None}
    if verifier is not None:
        given["verifier"] = verifier
    saved, files = split_files(given, plan.options)
    plan = _replace_parts(plan, _resolve_verifier(verifier, owner), parts)
    own = {name: value for name, value in given.items() if name in owner.parts}
    session = plug.session(model, plan, drafter, own)
    _warn_of_self_drafting(plan, drafter, source)
    made = session.interface(session, owner, saved)
    made.files = files
    again = {"drafter": drafter, "verifier": verifier, "modality": modality, **parts}
    made.remake = partial(accelerate, model, recipe, **again)
    return made


def _warn_of_self_drafting(plan: Recipe, drafter: Any, source: Any) -> None:
    """Warn where the target drafts for itself, unless a gate skips its verification."""
    is_named = isinstance(drafter, str | Path) and isinstance(source, str | Path)
    is_same = drafter is source or (is_named and str(drafter) == str(source))
    if drafter is not None and is_same and plan.gate is None:
        log.warning(
            "drafter= is the target itself, so a drafted token costs as much as a generated one; "
            "give a smaller model, or leave drafter= out"
        )


def select_recipe(owner: Modality, recipe: str | Recipe | None, is_drafted: bool) -> Recipe:
    """The named or given recipe, or the default one. Raises ValueError for anything else."""
    if recipe is None:
        recipe = (
            owner.recipe_with_drafter if is_drafted and owner.recipe_with_drafter else owner.recipe
        )
    if isinstance(recipe, str):
        return recipes.get(recipe)
    if not isinstance(recipe, Recipe):
        raise ValueError(
            f"recipe={format_value(recipe)} is neither a name nor a Recipe; give one of "
            "mmspec.recipes.names(), and a draft model as drafter="
        )
    return recipe


def _check_names(parts: Mapping[str, Any], owner: Modality, plan: Recipe) -> None:
    """Refuse keyword arguments that neither the modality nor the recipe has. Raises ValueError."""
    unknown = sorted(set(parts) - {*owner.parts, *plan.options})
    if "compile" in unknown and not parts["compile"]:
        unknown.remove("compile")
    if "compile" in unknown:
        raise ValueError(
            f"compile={parts['compile']!r}: no forward of modality {owner.name} is compiled by "
            "mmspec; drop compile=, or compile the model itself"
        )
    if unknown:
        known = [*PARTS, *owner.parts, *plan.options]
        where = f"accelerate() of {owner.name} with recipe {plan.name or 'custom'!r}"
        raise ValueError(unknown_message(unknown, known, where))


def _replace_parts(plan: Recipe, verifier: Verifier | None, parts: Mapping[str, Any]) -> Recipe:
    """The recipe with another verifier and other options. Raises ValueError for their types."""
    options = {name: value for name, value in parts.items() if name in plan.options}
    for name, value in options.items():
        check_same_kind(name, value, plan.options[name], plan.least.get(name))
    return replace(plan, verifier=verifier or plan.verifier, options={**plan.options, **options})


def _resolve_verifier(given: Verifier | str | None, owner: Modality) -> Verifier | None:
    """The verifier that was named or given. Raises ValueError for one that does not fit."""
    if given is None:
        return None
    verifier = verifiers.parse_verifier(given) if isinstance(given, str) else given
    if not isinstance(verifier, Verifier):
        raise ValueError(
            f"verifier={format_value(verifier)} is not a verifier; give a name, such as 'coupled', "
            "an object of mmspec.verifiers, or a rule as mmspec.verifiers.recursive.Recursive(rule)"
        )
    if verifier.decodes and set(verifier.decodes).isdisjoint(owner.all_decodes):
        raise ValueError(
            f"{type(verifier).__name__} verifies {' or '.join(verifier.decodes)}, and models of "
            f"modality {owner.name} decode {' or '.join(owner.all_decodes)}; choose another "
            "verifier, such as 'coupled'"
        )
    return verifier


def decode_plain(model: Any, **arguments: Any) -> Any:
    """Decode plainly, one token per forward, with the noise of every exact coupled recipe.

    Args:
        model: As for `accelerate`.
        arguments: Those of `generate`, among them `seed`.

    Returns:
        The output of `generate`. For a modality without tokens, that of its recipe without
        speculation.

    Raises:
        ValueError: As `accelerate` and `generate`.
    """
    recipe, parts = registry.find_modality(model).plain
    return accelerate(model, recipe, **parts).generate(**arguments)


def load(folder: str | Path, model: Any = None, **parts: Any) -> Accelerated:
    """Load what `save_pretrained` saved.

    Args:
        folder: A folder written by `save_pretrained`.
        model: The target. Default: the one that the folder names.
        parts: Further parts of `accelerate`, or other values for saved ones. `processor`, `codec`
            and `codes` belong to the target and are never saved.

    Raises:
        ValueError: A folder without a saved recipe, or an unknown target.
    """
    if not isinstance(folder, str | Path):
        raise ValueError(
            f"folder={folder!r} must be a path; give a folder written by save_pretrained"
        )
    return accelerate(**{**restore(Path(folder), model), **parts})
