"""Checks of `mmspec doctor` shared by all modalities: weights, tokenizers, recipes.

Models are built on the meta device from their configurations; no remote code is run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from mmspec import recipes, registry
from mmspec.modality import UNFIT, Finding
from mmspec.models.compatibility import compare_vocabularies
from mmspec.models.folder import read_shapes
from mmspec.recipe import Recipe

Bind = Callable[[Any, Recipe, Any, Mapping[str, Any]], Any]  # `session` of a plug
TAIL = 5  # last parts of a weight's name, independent of prefixes


def check_models(check: str, models: Sequence[Any], inspect: Callable[[Any], Any]) -> Finding:
    """Apply a check to each model; a ValueError refuses the pair."""
    results: list[Any] = []
    for model in models:
        try:
            results.append(inspect(model))
        except ValueError as error:
            ours, theirs = [*results, "refused", None][:2]
            return Finding(check, ours, theirs, "refused", str(error))
    ours, theirs = [*results, None][:2]
    return Finding(check, ours, theirs)


def is_refused(findings: Iterable[Finding]) -> bool:
    return any(finding.verdict == "refused" for finding in findings)


def skeleton(build: Callable[[], Any]) -> Any:
    """Build a model on the meta device."""
    with torch.device("meta"):
        return build()


def check_weights(folder: str, model: torch.nn.Module) -> str:
    """Check that a folder holds all weights of a model. Raises ValueError for missing weights.

    Elements are counted, since names change between versions of transformers; the weight named in
    an error is the first one whose last name parts are in no file.
    """
    if not Path(folder).is_dir():
        return "not local"
    there = read_shapes(Path(folder))
    own = {id(value): (name, value) for name, value in model.state_dict(keep_vars=True).items()}
    stored = sum(map(prod, there.values()))
    required = sum(value.numel() for _, value in own.values())
    if stored < required:
        known = {_tail(name) for name in there}
        missing = [name for name, _ in own.values() if _tail(name) not in known]
        example = f", such as {missing[0]}" if missing else ""
        raise ValueError(
            f"{folder} holds {stored} of {required} numbers of a {type(model).__name__}; weights "
            f"are missing{example}: copy them again"
        )
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for name, shape in there.items():
        shapes.setdefault(_tail(name), set()).add(tuple(shape))
    for name, value in own.values():
        known_shapes = shapes.get(_tail(name), {tuple(value.shape)})
        if tuple(value.shape) not in known_shapes:
            raise ValueError(
                f"{folder} holds {name} with shape {next(iter(known_shapes))}, but its config.json "
                f"requires {tuple(value.shape)}; copy both again"
            )
    return f"{stored / 1e6:.1f} M parameters, safetensors"


def _tail(name: str) -> str:
    return ".".join(name.split(".")[-TAIL:])


def compare_tokenizers(names: Sequence[str]) -> Finding:
    """Compare the vocabularies of two tokenizers."""
    check, auto = "same token ids", AutoTokenizer
    tables = list[dict[str, int]]()
    for name in names:
        try:
            tables.append(auto.from_pretrained(name, trust_remote_code=False).get_vocab())
        except Exception:  # damaged files raise various exceptions
            return Finding(check, None, None, "note", f"{name} has no tokenizer to compare")
    found = compare_vocabularies(*tables)
    if not found.remark:
        return Finding(check, found.ours, found.theirs)
    if found.differs:
        return Finding(check, found.ours, found.theirs, "refused", found.remark)
    return Finding(check, found.ours, found.theirs, "note", found.remark)


def find_fitting_recipes(session: Bind, model: Any, small: Any) -> Iterator[Finding]:
    """Recipes that can be bound to a model, or to a pair; the others by the reason why not.

    Without a draft model only recipes that take none are tried.
    """
    owner, has_drafter = registry.find_modality(model), small is not None
    fit, unfit = list[str](), dict[str, list[str]]()
    for name in recipes.names(*owner.all_decodes):
        recipe = recipes.get(name)
        if recipe.takes_drafter != has_drafter:
            continue
        reason = recipes.find_misfit(name, owner)
        if reason is None and has_drafter:
            is_taken = any(kind.accepts(small) for kind in recipe.draft_model)
            reason = None if is_taken else "take draft models of another kind"
        if reason is None:
            try:
                with _without_warnings():
                    session(model, recipe, small, {})
            except ValueError as error:
                reason = str(error).partition("; ")[0].removeprefix(f"recipe {name!r} ")
        if reason is None:
            fit.append(name)
        else:
            unfit.setdefault(reason, []).append(name)
    condition = "with this draft model" if has_drafter else "without a draft model"
    yield Finding(f"recipes that fit {condition}", ", ".join(fit) or "none")
    for reason, names in unfit.items():
        yield Finding(UNFIT, ", ".join(names), None, "note", reason)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Log no warnings: every recipe would repeat that of the pair."""
    logger = logging.getLogger("mmspec")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def fit_modality(model: Any, has_drafter: bool) -> Finding:
    """Recipes that fit the modality of a model that cannot be bound without its weights."""
    owner = registry.find_modality(model)
    names = [
        name
        for name in recipes.names(*owner.all_decodes)
        if recipes.get(name).takes_drafter == has_drafter
        and recipes.find_misfit(name, owner) is None
    ]
    remark = "by modality alone: binding needs the codebook, which is in the weights"
    return Finding("recipes", ", ".join(names), None, "note", remark)
