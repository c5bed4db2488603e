"""What `mmspec doctor` looks at, whatever a model decodes: folders, weights, tokenizers, recipes.

Models are built without memory ("meta"), from their configurations; no code of a folder is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from mmspec import recipes
from mmspec.modality import Finding
from mmspec.models.folder import tensors
from mmspec.models.words import compared
from mmspec.recipe import Recipe

Bind = Callable[[Any, Recipe, Any, Mapping[str, Any]], Any]  # `session` of a plug
TAIL = 5  # last parts of a weight's name, which stay when prefixes are renamed


def both(check: str, things: Sequence[Any], look: Callable[[Any], Any]) -> Finding:
    """The same look at each model; an error refuses the pair."""
    seen: list[Any] = []
    for thing in things:
        try:
            seen.append(look(thing))
        except ValueError as error:
            ours, theirs = [*seen, "refused", None][:2]
            return Finding(check, ours, theirs, "refused", str(error))
    ours, theirs = [*seen, None][:2]
    return Finding(check, ours, theirs)


def is_refused(findings: Iterable[Finding]) -> bool:
    return any(finding.verdict == "refused" for finding in findings)


def skeleton(build: Callable[[], Any]) -> Any:
    """A model without memory for its weights."""
    with torch.device("meta"):
        return build()


def weights(folder: str, model: torch.nn.Module) -> str:
    """Whether all of a model's numbers are there. Raises ValueError for damage and gaps.

    Numbers are counted, since names change between versions of transformers; the weight that an
    error names is the first whose last parts no file has.
    """
    if not Path(folder).is_dir():
        return "not local"
    there = tensors(Path(folder))
    own = {id(value): (name, value) for name, value in model.state_dict(keep_vars=True).items()}
    held = sum(map(prod, there.values()))
    wanted = sum(value.numel() for _, value in own.values())
    if held < wanted:
        known = {_tail(name) for name in there}
        lost = [name for name, _ in own.values() if _tail(name) not in known]
        example = f", such as {lost[0]}" if lost else ""
        raise ValueError(
            f"{folder} holds {held} of {wanted} numbers of a {type(model).__name__}; weights are "
            f"missing{example}: copy them again"
        )
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for name, shape in there.items():
        shapes.setdefault(_tail(name), set()).add(tuple(shape))
    for name, value in own.values():
        known_shapes = shapes.get(_tail(name), {tuple(value.shape)})
        if tuple(value.shape) not in known_shapes:
            raise ValueError(
                f"{folder} holds {name} with shape {next(iter(known_shapes))}, but its config.json "
                f"makes {tuple(value.shape)} of it; copy both again"
            )
    return f"{held / 1e6:.1f} M numbers, safetensors"


def _tail(name: str) -> str:
    return ".".join(name.split(".")[-TAIL:])


def tokenizers(names: Sequence[str]) -> Finding:
    """Whether token ids mean the same to both."""
    check, auto = "same tokens behind the ids", AutoTokenizer
    tables = list[dict[str, int]]()
    for name in names:
        try:
            tables.append(auto.from_pretrained(name, trust_remote_code=False).get_vocab())
        except Exception:  # whatever the reader of a damaged file raises
            return Finding(check, None, None, "note", f"{name} has no tokenizer to compare")
    found = compared(*tables)
    if not found.remark:
        return Finding(check, found.ours, found.theirs)
    if found.differs:
        return Finding(check, found.ours, found.theirs, "refused", found.remark)
    return Finding(check, found.ours, found.theirs, "note", found.remark)


def fitting(decodes: str, session: Bind, model: Any, small: Any) -> Iterator[Finding]:
    """Recipes that can be bound to a model, or to a pair; those of the other sort are left out."""
    fit, lacking, has_drafter = list[str](), list[str](), small is not None
    for name in recipes.names(decodes):
        recipe = recipes.get(name)
        if recipe.takes_drafter != has_drafter:
            continue
        try:
            session(model, recipe, small, {})
        except ValueError:
            lacking.append(name)
        else:
            fit.append(name)
    what = "with this draft model" if has_drafter else "without a draft model"
    yield Finding(f"recipes that fit {what}", ", ".join(fit) or "none")
    if lacking:
        remark = "`mmspec generate --recipe NAME` says why"
        yield Finding("recipes that do not", ", ".join(lacking), None, "note", remark)
