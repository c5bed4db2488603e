"""The contracts of a modality: one folder that loads, binds, runs and evaluates its models.

A modality has two halves. The description (`Modality`, the `MODALITY` of `modalities/<name>/`) is
data and imports no torch: names, settings, checkpoints. The implementation (`Plug` and the other
modules of `Modality.package`) is imported when it is used; `mmspec.registry` alone names it.
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from mmspec.errors import unknown_message

if TYPE_CHECKING:
    from mmspec.accelerated import Accelerated
    from mmspec.decode import Parts, RequestLike
    from mmspec.draft import Draft, Round
    from mmspec.recipe import Recipe
    from mmspec.stats import CompileLog, Stats

PICTURE_FILES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")


@dataclass(frozen=True)
class Entry:
    """A bundled checkpoint: a target, or a draft model trained for one.

    `trainer` names the module that trains it (`mmspec.zoo.training.Trainer`), `loader` the module
    that reads it: `load(entry, folder, dtype)` and `processor(entry, folder)`.
    """

    name: str
    description: str
    trainer: str
    loader: str
    target: str | None = None  # of a draft model: the target it was trained for
    drafter: str | None = None  # of a target: its default draft model
    sees: str = "nothing"  # what a draft model sees of the prompt
    settings: Mapping[str, Any] = field(default_factory=dict)  # defaults of calls
    recipe: str | None = None  # of a target: the default of commands
    recipes: Sequence[str] = ()  # of a draft model: those that it is made for; empty = any

    @staticmethod
    def read_entries(package: str) -> tuple[Entry, ...]:
        """Read the `zoo.toml` of a modality of this package.

        Its checkpoints are loaded by its module `checkpoints` and trained by the module `train` of
        the folder of the same name in `tools/zoo`, unless the file names another trainer.
        """
        text = files(package).joinpath("zoo.toml").read_text(encoding="utf-8")
        folder = package.removeprefix("mmspec.modalities.")
        made = {"trainer": f"tools.zoo.{folder}.train", "loader": f"{package}.checkpoints"}
        return tuple(Entry(name, **{**made, **one}) for name, one in tomllib.loads(text).items())

    @property
    def kind(self) -> str:
        return "target" if self.target is None else "drafter"


@dataclass(frozen=True)
class Source:
    """What is known of a user's model without reading weights."""

    given: Any  # the model, its folder or its name
    model_type: str | None = None  # of its configuration
    classes: tuple[str, ...] = ()  # names of its class and of the base classes
    checkpoint: str | None = None  # its name among the bundled ones


@dataclass(frozen=True)
class Modality:
    """The description of a modality.

    `owns` decides whether a source belongs to it; a modality that `is_general` comes last. Recipes
    fit that decode what it `decodes`: "tokens", "latents", "patches", or a word of its own. `parts`
    are the keyword arguments of `accelerate` beside recipe, drafter, verifier and the recipe's own
    options; `settings` is a dataclass of what one call takes on the command line (see `setting`).
    """

    name: str
    decodes: str
    recipe: str  # the default one
    settings: type
    package: str  # has the modules `plug`, `formatting` and `measures`
    owns: Callable[[Source], bool]
    zoo: tuple[Entry, ...] = ()
    parts: tuple[str, ...] = ()
    recipe_with_drafter: str | None = None  # the default one with a draft model
    parts_with_drafter: Mapping[str, Any] = field(default_factory=dict)  # of that recipe
    recipe_of_checkpoint: str | None = None  # the default one with a head of the checkpoint
    plain: tuple[str, Mapping[str, Any]] = ("plain", {})  # recipe and parts without speculation
    files: tuple[str, ...] = ()  # suffixes that `Formatter.render` writes, the default first
    is_general: bool = False
    also_decodes: tuple[str, ...] = ()  # what else recipes may decode for its models
    offers: tuple[str, ...] = ()  # what its models have of what recipes need (`Recipe.needs`)
    unsupported_options: tuple[str, ...] = ()  # options that none of its models honours
    unsupported_models: Mapping[str, str] = field(default_factory=dict)  # model types; the reasons
    command_call: str | None = None  # the call that commands make; default: the first
    example_prompt: str = ""  # for its bundled models
    survey: str | None = None  # the module that measures every class of its library
    training_data: str | None = None  # the module that implements `TrainingData`
    placement: tuple[str, ...] = ()  # options of a `Placement` that its `load` honours

    @property
    def all_decodes(self) -> tuple[str, ...]:
        """What recipes may decode for it, its own first."""
        return (self.decodes, *self.also_decodes)

    def default_parts(self, recipe: str | None, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Parts of the default recipe with a draft model, unless a draft shape is given."""
        is_shaped = given.get("length") is not None or given.get("tree") is not None
        is_default = recipe is not None and recipe == self.recipe_with_drafter
        return self.parts_with_drafter if is_default and not is_shaped else {}


def setting(default: Any, about: str, **more: Any) -> Any:
    """A field of `Modality.settings`: its default, its help, and `min`, `max` or `choices`.

    `only` names the command that takes it ("generate" or "bench"), `writes` the suffixes of a file
    that will be written, `reads` what a file must hold, and `checkpoints` the bundled models that
    take it, if not all. One that `replaces_prompt` makes a prompt optional.
    """
    return field(default=default, metadata={"help": about, **more})


def parse_settings(cls: type, given: Mapping[str, Any]) -> Any:
    """Make a `cls` of settings. Raises ValueError for unknown names and for values out of range."""
    known = {one.name: one for one in fields(cls)}
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(unknown_message(unknown, known, "this modality"))
    for name, value in given.items():
        limits = known[name].metadata
        if value is None:
            continue
        if value != value:  # NaN
            raise ValueError(f"{name}={value!r} is not a number; give one")
        if limits.get("choices") is not None and value not in limits["choices"]:
            choices = ", ".join(map(str, limits["choices"]))
            raise ValueError(f"{name}={value!r} is not known; choose one of {choices}")
        if "min" in limits and value < limits["min"]:
            raise ValueError(f"{name}={value!r} is too small; give at least {limits['min']}")
        if "max" in limits and value > limits["max"]:
            raise ValueError(f"{name}={value!r} is too large; give at most {limits['max']}")
    if missing := [n for n, one in known.items() if n not in given and one.default is MISSING]:
        raise ValueError(f"{', '.join(missing)} is missing; give it")
    return cls(**given)


View = Callable[[Sequence[Sequence[Any]]], Any]  # of all tokens so far, per row


@dataclass(frozen=True)
class Call:
    """One request in terms of the loop; what a `Session` hands to it."""

    parts: Parts
    request: RequestLike
    recipe: Recipe  # as it was bound for this call
    view: View | None = None  # decodes partial output, for `Round.partial`
    models: tuple[Any, ...] = ()  # further models that its rounds run; threads take turns
    compiled: CompileLog | None = None  # counts compiled forwards, where they are asked for
    states: Any = None  # of a chain: what decodes its states, for traces
    rounds: Callable[[Any], Iterator[Round]] | None = None  # of the request; None = of `decode`


class Loop(Protocol):
    """The decoding loop as a session sees it; rounds are counted and observed outside."""

    @property
    def is_watched(self) -> bool: ...  # whether rounds are observed
    def __call__(self, call: Call) -> Iterator[Round]: ...
    def stats(self) -> Stats: ...  # of this request so far
    def report(self, stats: Stats) -> None: ...  # of a request that did not use the loop
    def show(self, round_: Round, draft: Draft, states: Any) -> None: ...  # a round of such a one


class Session(Protocol):
    """A model bound to a recipe.

    `interface` is the class on `mmspec.accelerated.Accelerated` that users get; its methods are the
    calls that the model has. `run` executes one of them with the loop that it is given, which a
    pipeline calls within its own code. `seed` and `row_ids` are among the checked arguments.
    """

    model: Any
    recipe: Recipe
    interface: type[Accelerated]
    signature: inspect.Signature | None = None  # of `__call__`, where transformers inspects it

    @property
    def sees(self) -> str: ...  # what the draft model sees of the prompt
    def run(
        self, call: str, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop
    ) -> Any: ...
    def save(self, folder: Path) -> None: ...  # the weights of the draft model, if any
    @property
    def name(self) -> str | None:
        """Where the model came from, for `mmspec.load`."""
        return self.model.config._name_or_path or None


@dataclass(frozen=True)
class RunResult:
    """The output of one request, for benchmarks and certificates."""

    values: Any  # compared by ==: new tokens per row, codes; None = not compared
    count: int  # what seconds are divided by: tokens, codes, images
    calls: float  # of the target, without the prefill
    exact: bool = True  # whether the output is claimed to have the target's distribution
    output: Any = None  # what qualities are measured on
    stats: Stats | None = None
    network_rows: float | None = None  # computed by all calls together, where counted
    seconds: float | None = None  # its own time; None = the whole time of the run
    rounds: Any = None  # the round in which each part of the output was accepted


RunResults = Mapping[str, Sequence[RunResult]]  # of every runner, one per request


class Runner(Protocol):
    """What a benchmark runs: our loop with a recipe, or a method of the library.

    `run_first_token` generates the first token of each row alone; None if that is not possible.
    """

    def run(self, request: Mapping[str, Any], seed: int) -> RunResult: ...

    def run_first_token(self, request: Mapping[str, Any], seed: int) -> RunResult | None:
        return None


@dataclass(frozen=True)
class Speculative(Runner):
    """Our loop with a recipe: an `Accelerated`."""

    fast: Any


@dataclass(frozen=True)
class Quality:
    """One named measure of output quality.

    `judge` gets the results of one runner and those of all; it returns a value and a weight per
    item (averaged, with a standard error), or nothing where it does not apply.
    """

    name: str
    judge: Callable[[Sequence[RunResult], RunResults], Sequence[tuple[float, float]]]


Progress = Callable[[str, int, int], None]
Runners = Mapping[str, Runner]
MakePeers = Callable[[Runners, int, Progress], tuple[Runners, Mapping[str, str]]]


@dataclass(frozen=True)
class Workload:
    """What a benchmark measures: requests, qualities, baselines and peers.

    `timed` requests are timed; `judged` ones, if any, run once for the qualities alone. `plain` is
    plain decoding; `baselines` are the library's own methods (speed-ups end to end refer to the
    first), `fewer_steps` its sampling at less cost. `peers` makes runners of those of the recipes,
    a seed and a progress callback, and the reasons for missing ones; `controls` gets plain results.
    """

    timed: Sequence[Mapping[str, Any]]
    plain: Runner
    fast: Callable[[Any], Runner]
    baselines: Mapping[str, Runner] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)  # reasons for missing baselines
    supplies: tuple[str, ...] = ()  # options of recipes that its requests make up for
    peers: MakePeers | None = None
    controls: Callable[[Sequence[RunResult]], Mapping[str, Any]] | None = None  # uninformed
    fewer_steps: Mapping[int, Runner] = field(default_factory=dict)
    judged: Sequence[Mapping[str, Any]] = ()
    qualities: Sequence[Quality] = ()
    extras: Callable[[Sequence[RunResult], RunResults], Mapping[str, Any]] | None = None  # of a row
    batch: int = 1
    is_greedy: bool = False  # then results are compared value by value
    replayed: int = 0  # timed requests whose forwards are replayed alone
    # of a recipe and its parts on a tiny model
    tiny_model_distance: Callable[[str, Mapping[str, Any]], float | None] | None = None
    device: Any = "cpu"
    settings: Mapping[str, Any] = field(default_factory=dict)  # of all requests, for the report
    environment: Mapping[str, Any] = field(default_factory=dict)  # reported in addition


class Formatter(Protocol):
    """Turns prompts into requests, and outputs into text, data and files; of one model."""

    source: str  # the model argument

    def request(self, prompts: Sequence[str]) -> dict[str, Any]: ...  # arguments of the first call
    def text(self, output: Any) -> str | None: ...  # printed; None = only files
    def data(self, output: Any) -> dict[str, Any]: ...  # plain data for --json
    def render(self, output: Any, path: Path) -> tuple[Path, ...]: ...  # writes files


Outcome = Literal["ok", "note", "refused"]
UNFIT = "recipes that do not fit"  # check of findings that list recipes with the reason


@dataclass(frozen=True)
class Finding:
    """One check of `mmspec doctor`: what each model has, and whether they fit."""

    check: str
    target: Any
    drafter: Any = None
    verdict: Outcome = "ok"
    remark: str = ""


class Plug(Protocol):
    """The implementation of a modality: functions of its module `plug`.

    `load` reads a folder, a hub name or "zoo:NAME"; remote code needs `trust_remote_code`.
    """

    def load(self, source: str | Path, **options: Any) -> Any: ...
    def session(
        self, model: Any, recipe: Recipe, drafter: Any, parts: Mapping[str, Any]
    ) -> Session: ...


class Formatting(Protocol):
    """What commands use of a modality: functions of its module `formatting`.

    `load_drafter` and `formatter` run no remote code either. `examine` checks a model or a pair
    without reading weights into memory.
    """

    def load_drafter(self, model: Any, source: str | Path, **options: Any) -> Any: ...
    def formatter(self, source: str, model: Any, settings: Any, **options: Any) -> Formatter: ...
    def examine(self, target: str, drafter: str | None) -> list[Finding]: ...


class Teacher(Protocol):
    """Makes requests to the target of `mmspec train` of `training.conversations.Question`s."""

    reader: Any  # the `mmspec.targets.readers.reader.Reader` of the model
    end_ids: frozenset[int]  # tokens that end an answer
    max_answer_tokens: int | None  # of an answer; None = as many as are requested

    def check(self, questions: Sequence[Any]) -> Mapping[int, str]: ...
    # why rows cannot be read, by their number; raises ValueError if the data are of another kind
    def load_media(self, question: Any) -> Any: ...  # raises ValueError if unreadable
    def inputs(self, questions: Sequence[Any], opened: Sequence[Any]) -> dict[str, Any]: ...
    # arguments of the first call, (B, L) ids padded on the left
    def tokens(self, answer: str) -> list[int]: ...  # of an answer in the data, with the end token
    def text(self, tokens: Sequence[int]) -> str: ...  # of an answer; ValueError if it is no text


class TrainingData(Protocol):
    """Training data of a modality: functions of the module `Modality.training_data`."""

    def check_media(self, media: Any) -> None: ...  # a `training.media.Media`; raises ValueError
    def teacher(self, source: str, model: Any, **options: Any) -> Teacher: ...
    def skeleton(self, source: str) -> Any: ...  # a model on the meta device
    def names_environment(self, data: str) -> bool: ...  # whether data names an environment
    def record_episodes(
        self, data: str, teacher: Any, folder: Path, seed: int, progress: Any
    ) -> Path: ...  # writes episodes of the environment to a file


class Survey(Protocol):
    """Which classes of a library work: functions of the module `Modality.survey`."""

    def survey(self) -> Iterator[Any]: ...  # one line (a dataclass) per class
    def markdown(self, lines: Sequence[Any]) -> str: ...


@dataclass(frozen=True)
class Selection:
    """The requests of a workload."""

    prompts: Sequence[str] | None  # of the user; None = held-out examples
    count: int  # requests in all, at least `batch`
    batch: int
    seed: int
    drafter: Any = None  # a draft model, for peers that take one


class Measures(Protocol):
    """How a modality is measured: functions of its module `measures`, which may import `bench`."""

    def workload(
        self, model: Any, formatter: Formatter, settings: Any, selection: Selection
    ) -> Workload: ...
    def certify(self, recipe: Recipe, trial: Any) -> tuple[Recipe, Iterable[Any]]:
        """The recipe as it was bound, and the `Check`s of a `Trial` (`mmspec.bench.certificate`).

        Raises ValueError for a recipe that cannot be tested here.
        """
