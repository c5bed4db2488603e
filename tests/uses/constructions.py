"""Models, recipes and parts that do not go together, and functions that are given nonsense."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

import mmspec
from mmspec import compressors, recipes, registry, zoo
from mmspec.trees import Tree
from mmspec.verifiers import parse_verifier
from tests.toys.folders import SPOIL_THE_MODEL
from tests.uses.judging import Misuse
from tests.uses.requests import NAN, _parts
from tests.uses.subjects import SUBJECTS, Subject

WRONG: dict[str, tuple[Any, ...]] = {  # parts, where the modality has them
    "tree": ("wide", [0], [2, -1], [], 3, [1.5], "3,2", NAN, [[2]], {}),
    "length": ("long", -1, 1.5, [3], NAN, "", {}),
    "sees": ("sounds", 5, {}, [], ["pixels"], True),
    "compressor": ("fewer", 5, True, {}, [], torch.nn.Linear(2, 2)),
    "window": (0, -1, "wide", 1.5, [2], NAN, {}),
    "max_rows": (0, -1, "x", 1.5, NAN, [1]),
    "processor": (5, "x", {}),
}
VERIFIERS: tuple[Any, ...] = (
    "no-such",
    5,
    [],
    {},
    True,
    "",
    torch.nn.Linear(2, 2),
    "Coupled",
    b"x",
)
RECIPES: tuple[Any, ...] = (5, [], {}, True, "", b"coupled", ["coupled"], "no-such", object)
DRAFTERS: tuple[Any, ...] = (5, [], {}, True, "zoo:nope", "./nowhere", Path("nowhere/at/all"), "")
MODELS: tuple[Any, ...] = (5, None, [], {}, "zoo:nope", "./nowhere", "a b c", "", torch.zeros(2))
MODALITIES: tuple[Any, ...] = ("music", 5, [], "", "VLM", b"vlm")


def misuse(rng: Random, folders: Path) -> Misuse:
    """One thing that cannot be made."""
    makers: Sequence[Callable[[Random, Path], Misuse]]
    makers = (
        _model,
        _recipe,
        _drafter,
        _drafter,
        _verifier,
        _part,
        _part,
        _option,
        _option,
        _function,
    )
    return rng.choice(makers)(rng, folders)


def _accelerated(model: Any, what: str, wrong: Sequence[str], *recipe: Any, **given: Any) -> Misuse:
    shown = ", ".join([*map(repr, recipe), *(f"{k}={_short(v)}" for k, v in given.items())])
    call = partial(mmspec.accelerate, model, *recipe, **given)
    return Misuse(f"accelerate({what}, {shown})", tuple(wrong), call)


def _short(value: Any) -> str:
    return type(value).__name__ if isinstance(value, torch.nn.Module) else repr(value)[:80]


def _model(rng: Random, folders: Path) -> Misuse:
    """A model that is none, or whose folder is damaged."""
    if rng.random() < 0.4:
        model: Any = rng.choice((*MODELS, torch.nn.Linear(2, 2), SUBJECTS["llama"].model.config))
        wrong = [type(model).__name__, str(model).removeprefix("zoo:")]
        return _accelerated(model, repr(model)[:60], wrong)
    name = rng.choice((*SPOIL_THE_MODEL, "empty", "file"))
    folder = str(folders / name)
    if rng.random() < 0.3:
        return _accelerated(folder, name, [name], modality=rng.choice([*registry.modalities()]))
    return _accelerated(folder, name, [name])


def _recipe(rng: Random, folders: Path) -> Misuse:
    """A recipe of another modality, misspelt, or none at all."""
    subject = SUBJECTS[rng.choice([*SUBJECTS])]
    foreign = [name for name in recipes.names() if name not in recipes.names(subject.decodes)]
    misspelt = "".join(rng.sample(name := rng.choice(recipes.names()), len(name)))
    recipe = rng.choice((rng.choice(foreign), rng.choice(foreign), misspelt, rng.choice(RECIPES)))
    return _accelerated(subject.model, subject.name, [str(recipe), repr(recipe)], recipe)


def _fitting(rng: Random, drafts: bool | None = None) -> tuple[Subject, str]:
    """A model, and a recipe that decodes what it gives."""
    while True:
        subject = SUBJECTS[rng.choice([*SUBJECTS])]
        name = rng.choice(recipes.names(subject.decodes))
        if drafts is None or recipes.get(name).takes_drafter is drafts:
            return subject, name


def _drafter(rng: Random, folders: Path) -> Misuse:
    """A draft model that is none, is missing, not wanted, of another sort, or damaged."""
    subject, recipe = _fitting(rng)
    if not recipes.get(recipe).takes_drafter:
        small = rng.choice((subject.model, "zoo:llava-drafter", 5))
        wrong = [repr(recipe), "drafter"]
        return _accelerated(subject.model, subject.name, wrong, recipe, drafter=small)
    others = [one.model for one in SUBJECTS.values() if one.decodes != subject.decodes]
    name = rng.choice(SPOIL_THE_MODEL)
    small = rng.choice((None, rng.choice(DRAFTERS), rng.choice(others), str(folders / name)))
    wrong = ["drafter", repr(recipe), type(small).__name__, str(small).removeprefix("zoo:"), name]
    return _accelerated(subject.model, subject.name, wrong, recipe, drafter=small)


def _verifier(rng: Random, folders: Path) -> Misuse:
    subject, recipe = _fitting(rng, drafts=False)
    verifier = rng.choice(VERIFIERS)
    wrong = ["verifier", repr(verifier)]
    return _accelerated(subject.model, subject.name, wrong, recipe, verifier=verifier)


def _part(rng: Random, folders: Path) -> Misuse:
    """A part with a value that is none, or one that the modality does not have."""
    subject, recipe = _fitting(rng, drafts=False)
    name = rng.choice([*WRONG])
    value = rng.choice(WRONG[name])
    wrong = [name, *_parts(value)]
    return _accelerated(subject.model, subject.name, wrong, recipe, **{name: value})


# never skips a forward; skips no layer
MEANT: tuple[tuple[str, Any], ...] = (("threshold", -3), ("threshold", -0.5), ("skip", []))


def _option(rng: Random, folders: Path) -> Misuse:
    """A recipe's own option with a value that is none, or one that it does not have."""
    while True:
        subject, recipe = _fitting(rng, drafts=False)
        options = recipes.get(recipe).options
        if options and rng.random() < 0.8:
            name = rng.choice([*options])
            odd = [NAN, "x", -3, [], {}, object(), -0.5, b"x"]
            value = rng.choice([one for one in odd if type(one) is not type(options[name])])
            if (name, value) in MEANT:
                continue
        elif rng.random() < 0.5:
            name, value = rng.choice(("lenght", "tau", "delta", "colour", "steps", "alpha")), 3
            if name in options:
                continue
        else:
            continue
        # or the model, where it cannot have that recipe at all
        wrong = [name, *_parts(value), type(subject.model).__name__]
        return _accelerated(subject.model, subject.name, wrong, recipe, **{name: value})


def _function(rng: Random, folders: Path) -> Misuse:
    """The other functions that are public."""
    name = rng.choice((*SPOIL_THE_MODEL, "empty", "file", "nowhere"))
    odd: Any
    folder, odd = folders / name, rng.choice((5, None, "nope", "", -1, 1.5, b"x"))
    text = SUBJECTS["llama"]
    calls: dict[str, tuple[Callable[[], Any], Sequence[str]]] = {
        f"load({name})": (partial(mmspec.load, folder), [name]),
        f"load({name}, model)": (partial(mmspec.load, folder, text.model), [name]),
        f"load({odd!r})": (partial(mmspec.load, odd), [str(odd), repr(odd)]),
        f"recipes.get({odd!r})": (partial(recipes.get, odd), [str(odd)]),
        f"recipes.describe({odd!r})": (partial(recipes.describe, odd), [str(odd)]),
        f"zoo.load({odd!r})": (partial(zoo.load, odd), [str(odd)]),
        f"zoo.path({odd!r})": (partial(zoo.path, odd), [str(odd)]),
        f"zoo.processor({odd!r})": (partial(zoo.processor, odd), [str(odd)]),
        f"registry.get({odd!r})": (partial(registry.get, odd), [str(odd)]),
        f"verifiers.parse_verifier({odd!r})": (partial(parse_verifier, odd), [str(odd)]),
        f"compressors.named({odd!r})": (partial(compressors.parse_compressor, odd), [str(odd)]),
        f"Tree.branching({odd!r})": (partial(Tree.branching, odd), [str(odd)]),
        f"save_pretrained({name})": (
            partial(text.fast.save_pretrained, folders / "file"),
            ["file"],
        ),
        f"decode_plain({odd!r})": (
            partial(mmspec.decode_plain, odd, **text.request()),
            [str(odd), type(odd).__name__],
        ),
        f"modality={odd!r}": (
            partial(mmspec.accelerate, text.model, modality=rng.choice(MODALITIES)),
            ["modality", "vlm"],
        ),
        "stream(call='draw')": (lambda: next(text.fast.stream(call="draw")), ["draw"]),
        "generate_images()": (lambda: text.fast.generate_images(prompt="x"), ["generate_images"]),
    }
    shown = rng.choice([*calls])
    call, wrong = calls[shown]
    return Misuse(shown, tuple(wrong), call)
