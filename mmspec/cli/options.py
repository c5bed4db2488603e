"""Options of commands: those of the model, and those that modalities declare in their settings.

A command declares its own options; `model_command` adds the others to its signature, grouped by
modality, and passes all to a function of a module that is imported when the command runs. Nothing
here imports torch.
"""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from importlib import import_module
from types import NoneType, UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperGroup

from mmspec import registry
from mmspec.cli.output import print_error
from mmspec.errors import parse_json
from mmspec.modality import Modality, setting

# options that a modality may have as parts of `accelerate`
PARTS = ("length", "tree", "compressor", "kv", "window", "max_rows", "sampler", "codec")
IMAGE_MODEL = "zoo:image"  # default of commands about image tokens
Prompts = Annotated[list[str] | None, typer.Option(help="A prompt; repeatable.")]
Count = Annotated[int, typer.Option(min=1, max=100_000, help="Number of bundled examples to time.")]
Repeats = Annotated[int, typer.Option(min=1, max=10_000, help="Number of measurements.")]
Threads = Annotated[int | None, typer.Option(min=1, max=1024, help="CPU threads to use.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1)]
SINGLE = ("prompt", "image", "video", "audio")  # inputs that may be given once
# how models are loaded, where the modality can: fields of `mmspec.models.placement.Placement`
PLACEMENT = ("device", "dtype", "device_map", "attn", "quantize")
DRAFTER_DEVICE = "drafter_device"


@dataclass(frozen=True)
class ModelOptions:
    """The model and how to run it, as given on the command line; None = default."""

    model: str | None = setting(
        None, "Target: a folder, a hub name or zoo:NAME; default: a bundled model."
    )
    modality: str | None = setting(None, "Where a model has several, or its hub name shows none.")
    drafter: str | None = setting(
        None,
        "Draft model or head: a folder, a hub name or zoo:NAME; default: the target's bundled one.",
    )
    recipe: list[str] | None = setting(None, "One of `mmspec recipes`.")
    verifier: str | None = setting(
        None,
        "In place of the recipe's verifier: NAME or NAME:ranks=3, of mmspec.verifiers.names().",
    )
    overrides: list[str] | None = setting(
        None,
        "An option of the recipe, NAME=VALUE (`mmspec show RECIPE` lists them), or of one of "
        "several, RECIPE.NAME=VALUE; repeatable.",
        option="--set",
    )
    seed: int = setting(0, "Seed of all noise.", min=0, max=2**63 - 1)
    threads: int | None = setting(None, "CPU threads to use.", min=1, max=1024)
    compile: bool = setting(False, "Run forwards as compiled graphs (torch.compile).")
    trust_remote_code: bool = setting(False, "Run code from the model's folder.")
    json: bool = setting(False, "Print one JSON document on stdout.")
    length: str | None = setting(
        None,
        "Draft length: a number of tokens, auto, heuristic, entropy, adaptive-entropy, confidence, "
        "thompson, specdec-pp or disco.",
    )
    tree: str | None = setting(
        None,
        "Draft tree: children per level such as 3,2,1, or auto, dynamic, best-first, entropy, ...",
    )
    compressor: str | None = setting(
        None,
        "Reduces visual tokens for the drafter: NAME or NAME:keep=0.25, see `mmspec compressors`.",
    )
    kv: str | None = setting(
        None,
        "Keys and values that the target drafts on: same, sparse:tokens=512, text, pooled, tokens.",
    )
    window: int | None = setting(None, "Maximum number of drafted states per round.", min=1)
    max_rows: int | None = setting(None, "Maximum number of rows per network forward.", min=1)
    sampler: str | None = setting(
        None, "stochastic: sample with noise where the pipeline's scheduler adds none."
    )
    codec: str | None = setting(
        None, "Audio codec: a folder beside the model's weights, another folder, or a hub name."
    )
    device: str | None = setting(None, "Device of the weights: cpu (default), cuda, cuda:1, mps.")
    dtype: str | None = setting(
        None, "float32, bfloat16 or float16; default: as saved, float32 for bundled models."
    )
    device_map: str | None = setting(
        None, "auto, balanced, sequential or a JSON file: spreads over devices, memory, disk."
    )
    attn: str | None = setting(None, "Attention implementation: sdpa, eager, flex_attention.")
    quantize: str | None = setting(
        None, "Weights of the target's linear layers: int8, int4, bnb-int8, bnb-nf4."
    )
    drafter_device: str | None = setting(None, "Device of the draft model; default: the target's.")
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the modality; given ones only
    command: str = "generate"

    @property
    def placed(self) -> dict[str, str]:
        """The options of placement that are given."""
        given = {name: getattr(self, name) for name in PLACED}
        return {name: value for name, value in given.items() if value is not None}

    def keywords(self) -> dict[str, Any]:
        """Parts and options as `accelerate` takes them. Raises ValueError for invalid ones."""
        made: dict[str, Any] = {
            "window": self.window,
            "max_rows": self.max_rows,
            "sampler": self.sampler,
            "verifier": self.verifier,
            "compressor": self.compressor,
            "kv": self.kv,
            "codec": self.codec,
            "compile": self.compile or None,
        }
        if self.length is not None:
            made["length"] = int(self.length) if self.length.isdecimal() else self.length
        if self.tree is not None:
            made["tree"] = _parse_widths(self.tree)
        given = {name: value for name, value in made.items() if value is not None}
        overrides = parse_pairs(self.overrides or ())
        for name in overrides:
            option = name.rpartition(".")[2]
            if option in SEPARATE:
                raise ValueError(f"--set {name}: {option} is set by {flag(option)}; give that")
            if name in given:
                raise ValueError(f"--set {name} and {flag(name)} are the same; drop one of them")
        return {**given, **overrides}


PLACED = (*PLACEMENT, DRAFTER_DEVICE)
NOT_OPTIONS = ("settings", "command")
SEPARATE = ("model", "modality", "drafter", "recipe")  # not set by --set


def model_command(
    function: str,
    command: str,
    without: tuple[str, ...] = (),
    alone: Mapping[str, tuple[str, ...]] | None = None,
    settings: bool = True,
    **defaults: Any,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options of `ModelOptions` and of all modalities to a command.

    The decorated function only declares the command; `function`, "module:name", gets the
    `ModelOptions` and the command's own options, unless a subcommand is called. Settings are those
    of `command`; `without` names options of `ModelOptions` to leave out, `defaults` are other
    defaults of the rest. `alone` names options that exclude all others but the listed ones; a
    command with any, or with subcommands, declares the `context`. `settings` is whether it takes
    those of modalities.
    """
    takes_settings = settings

    def decorate(declaration: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(declaration, eval_str=True)
        own = [one for one in fields(ModelOptions) if one.name not in (*NOT_OPTIONS, *without)]
        hints = get_type_hints(ModelOptions)
        more = [
            _model_option(one, hints[one.name], defaults.get(one.name, one.default)) for one in own
        ]
        settings = [
            one
            for one in (_setting_options(command) if takes_settings else ())
            if one.name not in signature.parameters
        ]

        def call(**given: Any) -> None:
            context = given.pop("context", None)
            if context is not None:
                _check_unused(context, alone or {})
                if context.invoked_subcommand is not None:
                    return
            mine = {one.name: given.pop(one.name) for one in own}
            values = {one.name: given.pop(one.name) for one in settings}
            values = {name: value for name, value in values.items() if value is not None}
            run_function(function, ModelOptions(**mine, settings=values, command=command), **given)

        every = [*signature.parameters.values(), *more, *settings]
        call.__signature__ = signature.replace(parameters=every)  # type: ignore[attr-defined]
        call.__doc__ = declaration.__doc__
        return call

    return decorate


def placed_command(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add options of `PLACEMENT` to a command, which gets those given as the dict `placed`."""

    def decorate(declaration: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(declaration, eval_str=True)
        own = [one for one in fields(ModelOptions) if one.name in names]
        hints = get_type_hints(ModelOptions)
        more = [_model_option(one, hints[one.name], one.default) for one in own]

        def call(**given: Any) -> None:
            values = {one.name: given.pop(one.name) for one in own}
            placed = {name: value for name, value in values.items() if value is not None}
            declaration(**given, placed=placed)

        kept = [one for name, one in signature.parameters.items() if name != "placed"]
        call.__signature__ = signature.replace(parameters=[*kept, *more])  # type: ignore[attr-defined]
        call.__doc__ = declaration.__doc__
        return call

    return decorate


def _check_unused(context: typer.Context, alone: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse options that would be ignored. Raises typer.BadParameter."""
    names = {one.name: one.opts[0] for one in context.command.params}
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = [name for name, one in sources.items() if one is not None and one.name == "COMMANDLINE"]
    subcommand = context.invoked_subcommand
    if subcommand is not None and given:
        raise typer.BadParameter(
            f"{names[given[0]]} is given before {subcommand}, which has options of its own; give "
            f"it after {subcommand}",
            ctx=context,
        )
    for name, others in alone.items():
        unused = [names[one] for one in given if one not in (name, *others)]
        if name in given and unused:
            raise typer.BadParameter(
                f"{names[name]} ignores {', '.join(unused)}; drop one of them", ctx=context
            )


def run_function(function: str, *args: Any, **given: Any) -> None:
    """Call "module:name", imported now; an interrupt is one line and exit code 130."""
    module, _, name = function.partition(":")
    try:
        getattr(import_module(module), name)(*args, **given)
    except KeyboardInterrupt as stopped:
        print_error(" ".join(map(str, stopped.args)) or "interrupted; nothing was written")
        raise typer.Exit(130) from None


def _model_option(one: Field[Any], hint: Any, default: Any) -> inspect.Parameter:
    """The option of a field of `ModelOptions`."""
    panel = "Drafting (where the modality has it)" if one.name in PARTS else "Model"
    panel = "Placement (where the modality has it)" if one.name in PLACED else panel
    limits: dict[str, Any] = {name: one.metadata.get(name) for name in ("min", "max")}
    name = one.metadata.get("option", flag(one.name))
    about = typer.Option(name, help=one.metadata["help"], rich_help_panel=panel, **limits)
    made: Any = Annotated[hint, about]
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(one.name, kind, default=default, annotation=made)


def _setting_options(command: str) -> list[inspect.Parameter]:
    """The settings of all modalities as options; those of one name are one option."""
    owners: dict[str, dict[str, tuple[Field[Any], Any]]] = {}
    for modality in registry.modalities().values():
        hints = get_type_hints(modality.settings)
        for one in select_settings(modality, command):
            owners.setdefault(one.name, {})[modality.name] = (one, _option_type(hints[one.name]))
    return [_shared_option(name, found) for name, found in owners.items()]


def _shared_option(name: str, found: Mapping[str, tuple[Field[Any], Any]]) -> inspect.Parameter:
    """One option for the modalities that have it; None = not given. They check its limits."""
    kinds = {kind for _, kind in found.values()}
    hint = kinds.pop() if len(kinds) == 1 else str
    texts: dict[str, list[str]] = {}
    for owner, (one, _) in found.items():
        texts.setdefault(_help(one), []).append(owner)
    lines = [*texts]
    if len(texts) > 1:
        lines = [f"{', '.join(owners)}: {text}" for text, owners in texts.items()]
    names = (flag(name), f"--no-{flag(name)[2:]}") if hint is bool else (flag(name),)
    panel = f"Of modality {', '.join(found)}"
    about = typer.Option(*names, help=" ".join(lines), rich_help_panel=panel)
    made: Any = Annotated[hint | None, about]
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=made)


def _help(one: Field[Any]) -> str:
    """The help of a setting, its limits and its default."""
    text, choices = str(one.metadata["help"]), one.metadata.get("choices")
    if choices:
        text += f" One of {', '.join(map(str, choices))}."
    if one.metadata.get("min"):
        text += f" At least {one.metadata['min']}."
    return text if one.default is None else f"{text} Default {one.default}."


def _option_type(hint: Any) -> Any:
    """A type without None; str for types that the command line cannot parse."""
    if get_origin(hint) is UnionType:
        (hint, *rest) = [kind for kind in get_args(hint) if kind is not NoneType]
        hint = str if rest else hint
    return hint if hint in (int, float, bool, str) else str


def select_settings(modality: Modality, command: str) -> list[Field[Any]]:
    """The settings of a modality that a command takes."""
    every = fields(modality.settings)
    return [one for one in every if one.metadata.get("only") in (None, command)]


def flag(name: str) -> str:
    """An option's name on the command line."""
    return f"--{name.replace('_', '-')}"


def _parse_widths(tree: str) -> list[int] | str:
    """Branching widths, or the name of a tree. Raises ValueError for widths below 1."""
    if not re.fullmatch(r"[-\d]+(,[-\d]+)*", tree):
        return tree
    widths = [int(one) for one in tree.split(",") if re.fullmatch(r"-?\d+", one)]
    if len(widths) != tree.count(",") + 1 or min(widths) < 1:
        raise ValueError(f"--tree {tree} has an invalid width; give 1 or more, as in 3,2,1")
    return widths


def parse_pairs(pairs: list[str] | tuple[()]) -> dict[str, Any]:
    """Parse NAME=VALUE as `accelerate` takes it: numbers, inf, true, false and lists, else str."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        if not name or not value:
            raise ValueError(f"--set {pair} gives no value; give NAME=VALUE, as in --set order=2")
        try:
            found[name] = parse_json(value)
        except ValueError:
            found[name] = math.inf if value == "inf" else value
    return found


class DefaultGroup(TyperGroup):
    """A group whose unknown commands are arguments of its first command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = (*self.commands, *ctx.help_option_names)
        found = args if not args or args[0] in known else [next(iter(self.commands)), *args]
        parsed: list[str] = super().parse_args(ctx, found)
        return parsed


def refuse_repeated(command: Any) -> None:
    """Make a command, and all below it, refuse a single input that is given twice.

    The parser would take the last and ignore the others.
    """
    make_parser = command.make_parser

    def make(context: Any) -> Any:
        parser = make_parser(context)
        parse_args = parser.parse_args

        def parse(args: list[str]) -> Any:
            found = parse_args(args)
            for one, count in Counter(found[-1]).items():
                if count > 1 and one.name in SINGLE and not one.multiple:
                    raise typer.BadParameter(
                        f"{one.opts[0]} is given {count} times and takes one value; give it once",
                        ctx=context,
                    )
            return found

        parser.parse_args = parse
        return parser

    command.make_parser = make
    for one in getattr(command, "commands", {}).values():
        refuse_repeated(one)
