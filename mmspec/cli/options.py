"""Options of commands: those about the model, and those that modalities declare in their settings.

A command declares what is its own; `takes` adds the others to its signature, grouped by modality,
and hands all to the module that does the work, which is imported then. Nothing here needs torch.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from importlib import import_module
from types import NoneType, UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from mmspec import registry
from mmspec.cli.output import complain
from mmspec.modality import Modality, setting

# options that a modality may have among its parts
PARTS = ("length", "tree", "compressor", "kv", "window", "max_rows")


@dataclass(frozen=True)
class Choice:
    """What was said of the model and of how to run it, as it was typed; None = nothing."""

    model: str | None = setting(
        None, "Target: a folder, a hub name or zoo:NAME; one of the zoo if not said."
    )
    modality: str | None = setting(None, "Where a model has several, or a hub name does not say.")
    drafter: str | None = setting(None, "Draft model: the same; the zoo has its own.")
    recipe: list[str] | None = setting(None, "One of `mmspec recipes`.")
    verifier: str | None = setting(None, "Verify by another rule than the recipe's.")
    knobs: list[str] | None = setting(
        None,
        "A knob or part of all recipes, NAME=VALUE, or of one, RECIPE.NAME=VALUE (see `mmspec "
        "show`); repeatable.",
        option="--set",
    )
    seed: int = setting(0, "All noise follows from it.", min=0)
    threads: int | None = setting(None, "Processor threads to use.", min=1)
    trust_remote_code: bool = setting(False, "Run code that lies in the model's folder.")
    json: bool = setting(False, "Print one JSON document on stdout.")
    length: str | None = setting(None, "Draft length: a number, auto, entropy, ...")
    tree: str | None = setting(None, "Branching widths such as 3,2,1, or dynamic.")
    compressor: str | None = setting(
        None, "Thins what the drafter sees: NAME or NAME:keep=0.25, of `mmspec compressors`."
    )
    kv: str | None = setting(
        None,
        "Keys and values that the target drafts on: same, sparse:tokens=512, text, pooled, tokens.",
    )
    window: int | None = setting(None, "States that a round moves a chain at most.", min=1)
    max_rows: int | None = setting(None, "Rows of the network at a time.", min=1)
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the modality; given ones only
    command: str = "generate"

    def options(self) -> dict[str, Any]:
        """Parts and knobs as `accelerate` takes them. Raises ValueError for what is none."""
        made: dict[str, Any] = {
            "window": self.window,
            "max_rows": self.max_rows,
            "verifier": self.verifier,
            "compressor": self.compressor,
            "kv": self.kv,
        }
        if self.length is not None:
            made["length"] = int(self.length) if self.length.isdecimal() else self.length
        if self.tree is not None:
            made["tree"] = _widths(self.tree)
        given = {name: value for name, value in made.items() if value is not None}
        knobs = set_pairs(self.knobs or ())
        for name in knobs:
            said = name.rpartition(".")[2]
            if said in CHOSEN:
                raise ValueError(f"--set {name}: {said} is no knob; give {dashed(said)}")
            if name in given:
                raise ValueError(f"--set {name} and {dashed(name)} say the same; drop one of them")
        return {**given, **knobs}


NOT_OPTIONS = ("settings", "command")
CHOSEN = ("model", "modality", "drafter", "recipe")  # what knobs are turned of


def takes(
    module: str,
    command: str,
    without: tuple[str, ...] = (),
    alone: Mapping[str, tuple[str, ...]] | None = None,
    **defaults: Any,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of `Choice` and of all modalities, and its work a home.

    The decorated function is a declaration; `run(choice, ...)` of `module` gets what was typed,
    unless a command below this one is meant. Settings are those of `command`; `without` names
    options of `Choice` that are left out, and `defaults` are other ones of the rest. `alone` are
    options beside which only those that it names have a meaning; a command with any, or with
    commands below it, declares the `context`.
    """

    def declared(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        own = [one for one in fields(Choice) if one.name not in (*NOT_OPTIONS, *without)]
        hints = get_type_hints(Choice)
        more = [
            _parameter(one, hints[one.name], defaults.get(one.name, one.default)) for one in own
        ]
        settings = [one for one in _settings(command) if one.name not in signature.parameters]

        def call(**given: Any) -> None:
            context = given.pop("context", None)
            if context is not None:
                _check_heard(context, alone or {})
                if context.invoked_subcommand is not None:
                    return
            said = {one.name: given.pop(one.name) for one in own}
            asked = {one.name: given.pop(one.name) for one in settings}
            typed = {name: value for name, value in asked.items() if value is not None}
            work(module, Choice(**said, settings=typed, command=command), **given)

        every = [*signature.parameters.values(), *more, *settings]
        call.__signature__ = signature.replace(parameters=every)  # type: ignore[attr-defined]
        call.__doc__ = function.__doc__
        return call

    return declared


def _check_heard(context: typer.Context, alone: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse options that nobody would look at. Raises typer.BadParameter."""
    names = {one.name: one.opts[0] for one in context.command.params}
    sources = {name: context.get_parameter_source(name) for name in context.params}
    said = [name for name, one in sources.items() if one is not None and one.name == "COMMANDLINE"]
    below = context.invoked_subcommand
    if below is not None and said:
        raise typer.BadParameter(
            f"{names[said[0]]} stands before {below}, which has options of its own; write it "
            f"behind {below}",
            ctx=context,
        )
    for name, beside in alone.items():
        lost = [names[one] for one in said if one not in (name, *beside)]
        if name in said and lost:
            raise typer.BadParameter(
                f"{names[name]} looks at no {', '.join(lost)}; drop one of them", ctx=context
            )


def work(module: str, *args: Any, **given: Any) -> None:
    """`run` of a module, imported now; whoever stops it is told what was kept."""
    try:
        import_module(module).run(*args, **given)
    except KeyboardInterrupt as stopped:
        complain(" ".join(map(str, stopped.args)) or "interrupted; nothing was written")
        raise typer.Exit(130) from None


def _parameter(one: Field[Any], hint: Any, default: Any) -> inspect.Parameter:
    """An option out of a field of `Choice`."""
    panel = "Drafting (where the modality has it)" if one.name in PARTS else "Model"
    least, name = one.metadata.get("min"), one.metadata.get("option", dashed(one.name))
    about = typer.Option(name, help=one.metadata["help"], min=least, rich_help_panel=panel)
    made: Any = Annotated[hint, about]
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(one.name, kind, default=default, annotation=made)


def _settings(command: str) -> list[inspect.Parameter]:
    """The settings of all modalities as options; those of one name are one option."""
    owners: dict[str, dict[str, tuple[Field[Any], Any]]] = {}
    for modality in registry.modalities().values():
        hints = get_type_hints(modality.settings)
        for one in settings_for(modality, command):
            owners.setdefault(one.name, {})[modality.name] = (one, _bare(hints[one.name]))
    return [_shared(name, found) for name, found in owners.items()]


def _shared(name: str, found: Mapping[str, tuple[Field[Any], Any]]) -> inspect.Parameter:
    """One option for the modalities that have it; None = not said. Limits are theirs to check."""
    kinds = {kind for _, kind in found.values()}
    hint = kinds.pop() if len(kinds) == 1 else str
    words: dict[str, list[str]] = {}
    for owner, (one, _) in found.items():
        words.setdefault(_words(one), []).append(owner)
    lines = (
        words if len(words) == 1 else [f"{', '.join(who)}: {said}" for said, who in words.items()]
    )
    names = (dashed(name), f"--no-{dashed(name)[2:]}") if hint is bool else (dashed(name),)
    panel = f"Of modality {', '.join(found)}"
    about = typer.Option(*names, help=" ".join(lines), rich_help_panel=panel)
    made: Any = Annotated[hint | None, about]
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=made)


def _words(one: Field[Any]) -> str:
    """The help of a setting, its limits and its default."""
    said, choices = str(one.metadata["help"]), one.metadata.get("choices")
    if choices:
        said += f" One of {', '.join(map(str, choices))}."
    if one.metadata.get("min"):
        said += f" At least {one.metadata['min']}."
    return said if one.default is None else f"{said} Default {one.default}."


def _bare(hint: Any) -> Any:
    """A type without None; text for what the command line cannot read."""
    if get_origin(hint) is UnionType:
        (hint, *rest) = [kind for kind in get_args(hint) if kind is not NoneType]
        hint = str if rest else hint
    return hint if hint in (int, float, bool, str) else str


def settings_for(modality: Modality, command: str) -> list[Field[Any]]:
    """The settings of a modality that a command takes."""
    every = fields(modality.settings)
    return [one for one in every if one.metadata.get("only") in (None, command)]


def dashed(name: str) -> str:
    """An option's name on the command line."""
    return f"--{name.replace('_', '-')}"


def _widths(tree: str) -> list[int] | str:
    """Widths of branching, or the name of a tree. Raises ValueError for widths below 1."""
    if not re.fullmatch(r"[-\d]+(,[-\d]+)*", tree):
        return tree
    widths = [int(one) for one in tree.split(",") if re.fullmatch(r"-?\d+", one)]
    if len(widths) != tree.count(",") + 1 or min(widths) < 1:
        raise ValueError(f"--tree {tree} has a width that is none; give 1 or more, as in 3,2,1")
    return widths


def set_pairs(pairs: list[str] | tuple[()]) -> dict[str, Any]:
    """`NAME=VALUE` as `accelerate` takes it: numbers, inf, true, false and lists, else words."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        if not name or not value:
            raise ValueError(f"--set {pair} gives no value; write NAME=VALUE, as in --set order=2")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = math.inf if value == "inf" else value
    return found
