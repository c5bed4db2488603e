"""What a modality is: one folder that knows how its models are loaded, bound, asked and judged.

A modality has two halves. The light one (`Modality`, the `MODALITY` of `modalities/<name>/`) is
data and may be read without importing torch: names, settings, checkpoints. The heavy one (`Plug`,
the modules of `Modality.package`) does the work and is imported when a model of it is met.
Nothing outside a modality's folder names it: everybody asks `mmspec.registry`.
"""

from __future__ import annotations

import inspect
import math
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from mmspec.decode import Parts, RequestLike
    from mmspec.draft import Round
    from mmspec.recipe import Recipe
    from mmspec.stats import Stats

# endings of pictures that PIL writes without further options
PICTURE_FILES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")


@dataclass(frozen=True)
class Entry:
    """A checkpoint of the zoo: a target, or a drafter trained to follow one.

    `trainer` names the module that trains it (`mmspec.zoo.training.Trainer`), `loader` the module
    that reads it: `load(entry, folder, dtype)` and `processor(entry, folder)`.
    """

    name: str
    description: str
    trainer: str
    loader: str
    target: str | None = None  # of a drafter: whom it follows
    drafter: str | None = None  # of a target: its default drafter
    sees: str = "nothing"  # what it sees of its target's prompt
    settings: Mapping[str, Any] = field(default_factory=dict)  # of calls, where nothing is said
    recipe: str | None = None  # of a target: what commands take where none is named

    @staticmethod
    def read_entries(package: str) -> tuple[Entry, ...]:
        """The checkpoints in the `zoo.toml` of a modality of this package.

        They are read by its module `checkpoints`, and trained by the module `train` of the folder
        of the same name in `tools/zoo`, unless the file names another trainer.
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
    """What a user gave for a model, as far as it is known without reading weights."""

    given: Any  # the model, or its folder or name
    model_type: str | None = None  # of its configuration
    classes: tuple[str, ...] = ()  # names of its class and the classes it is made of
    checkpoint: str | None = None  # its name in the zoo


@dataclass(frozen=True)
class Modality:
    """The light half.

    `owns` says whether a source belongs here; a modality that `is_general` is asked last. What it
    `decodes` tells which recipes are for it: "tokens", "latents", "patches", or a word of its own.
    `parts` are what `accelerate` takes beside recipe, drafter, verifier and the recipe's own
    options; `settings` is a dataclass of what one call takes on the command line (see `setting`).
    """

    name: str
    decodes: str
    recipe: str  # the default one; `drafted` where a draft model is given
    settings: type
    package: str  # where the heavy half stands: its modules `plug`, `asking` and `measures`
    owns: Callable[[Source], bool]
    zoo: tuple[Entry, ...] = ()
    parts: tuple[str, ...] = ()
    recipe_with_drafter: str | None = None
    plain: tuple[str, Mapping[str, Any]] = ("plain", {})  # recipe and parts that speculate nothing
    files: tuple[str, ...] = ()  # endings that `Asker.render` writes, the usual one first
    is_general: bool = False
    also_decodes: tuple[str, ...] = ()  # further sorts of recipes that its models take
    unsupported_options: tuple[
        str, ...
    ] = ()  # options of recipes that none of its models can serve
    command_call: str | None = (
        None  # the call that commands make, where that is not the customary one
    )
    survey: str | None = None  # the module that measures every class of the library behind it
    training_data: str | None = (
        None  # the module that makes requests of training data (`TrainingData`)
    )

    @property
    def all_decodes(self) -> tuple[str, ...]:
        """What recipes for it decode, its own first."""
        return (self.decodes, *self.also_decodes)


def setting(default: Any, about: str, **more: Any) -> Any:
    """A field of `Modality.settings`: its default, its help, and `min`, `max` or `choices`.

    `only` names the command that takes it ("generate" or "bench"; all if not said), and `writes`
    the endings of a file that is going to be written.
    """
    return field(default=default, metadata={"help": about, **more})


def parse_settings(cls: type, given: Mapping[str, Any]) -> Any:
    """`cls` made of what was given. Raises ValueError for what it does not have, or out of range.

    The message names the value, the rule, and what is known.
    """
    known = {one.name: one for one in fields(cls)}
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)} is no setting here; known: {', '.join(known) or 'none'}"
        )
    for name, value in given.items():
        limits = known[name].metadata
        if value is None:
            continue
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"{name}={value!r} is no number; give one")
        if limits.get("choices") is not None and value not in limits["choices"]:
            choices = ", ".join(map(str, limits["choices"]))
            raise ValueError(f"{name}={value!r} is not known; choose one of {choices}")
        if limits.get("min") is not None and value < limits["min"]:
            raise ValueError(f"{name}={value!r} is too small; give at least {limits['min']}")
        if limits.get("max") is not None and value > limits["max"]:
            raise ValueError(f"{name}={value!r} is too large; give at most {limits['max']}")
    missing = [one.name for one in fields(cls) if one.name not in given and one.default is MISSING]
    if missing:
        raise ValueError(f"{', '.join(missing)} is missing; give it")
    return cls(**given)


View = Callable[[Sequence[Sequence[Any]]], Any]  # of all tokens so far, per row


@dataclass(frozen=True)
class Call:
    """One request in terms of the loop; what a `Session` hands to it."""

    parts: Parts
    request: RequestLike
    recipe: Recipe  # as it was bound for this call
    view: View | None = None  # of what a person may look at before the end
    models: tuple[Any, ...] = ()  # that its rounds call beside the session's: threads take turns


class Loop(Protocol):
    """The loop as a session sees it: rounds of a call, counted and watched from outside."""

    @property
    def is_watched(self) -> bool: ...  # whether somebody waits for the rounds
    def __call__(self, call: Call) -> Iterator[Round]: ...
    def stats(self) -> Stats: ...  # of all that was decoded so far in this request
    def report(self, stats: Stats) -> None: ...  # of a run that did not go through the loop


class Session(Protocol):
    """A model bound to a recipe.

    `calls` are the ways to ask it, the customary one first, by the name that users know:
    "generate", "generate_images", "__call__". `run` answers one of them; whoever calls whom (a
    pipeline calls us, and we call a language model), the loop is handed in. `seed` and `row_ids`
    arrive checked, among the arguments. Calls are declared here and nowhere else; the docstring of
    `run` says what they take. `methods` answer users directly, without the loop.
    """

    model: Any
    recipe: Recipe
    calls: tuple[str, ...]
    methods: tuple[str, ...] = ()
    signature: inspect.Signature | None = None  # of being called, for who looks before calling

    @property
    def sees(self) -> str: ...  # what the drafter sees of the prompt
    def run(
        self, call: str, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop
    ) -> Any: ...
    def save(self, folder: Path) -> None: ...  # the drafter's weights, where there are some
    @property
    def name(self) -> str | None:
        """Where the model came from, for `mmspec.load`."""
        return self.model.config._name_or_path or None


@dataclass(frozen=True)
class RunResult:
    """What came out for one request, as far as races and certificates must know."""

    values: Any  # what is compared by ==: new tokens per row, codes; None where nothing is
    count: int  # what seconds are divided by, alike for all contestants: tokens, codes, pictures
    calls: float  # of the target, prefill aside
    exact: bool = True  # whether the distribution of the output is claimed to be the target's
    output: Any = None  # what a judge looks at
    stats: Stats | None = None
    network_rows: float | None = None  # that all calls together computed, where they are counted
    seconds: float | None = None  # its own time, where more happened meanwhile; None = all of it
    rounds: Any = None  # of the loop: in which one each part of the output was kept, if it is told


RunResults = Mapping[str, Sequence[RunResult]]  # of every contestant, one per request


class Runner(Protocol):
    """Who takes part in a race: our loop with some recipe, or a way of the library's own.

    `first` answers with the first token of each row alone, for the time of a prefill; None where
    there is no such thing.
    """

    def run(self, request: Mapping[str, Any], seed: int) -> RunResult: ...

    def run_first_token(self, request: Mapping[str, Any], seed: int) -> RunResult | None:
        return None


@dataclass(frozen=True)
class Speculative(Runner):
    """Our loop with some recipe: an `Accelerated`."""

    fast: Any


@dataclass(frozen=True)
class Quality:
    """One named measure of answers.

    `judge` gets a contestant's answers and everybody's; it returns a value and a weight per item
    (averaged, with a standard error), or nothing where it has nothing to say.
    """

    name: str
    judge: Callable[[Sequence[RunResult], RunResults], Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class Workload:
    """What a race is about: requests, how good answers are, and who else runs.

    `timed` are measured; `judged` (if any) are answered once, for the qualities alone. `fast` makes
    a contestant of an accelerated model; `plain` is plain decoding. `baselines` are the library's
    own ways, the first of which end-to-end speed-ups refer to. `peers` makes further ones, out of
    the contestants of the recipes, a seed and a progress, and says why some are missing. `controls`
    makes accelerated models whose drafters know nothing, out of plain answers.
    """

    timed: Sequence[Mapping[str, Any]]
    plain: Runner
    fast: Callable[[Any], Runner]
    baselines: Mapping[str, Runner] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)  # baselines that there are not, why
    peers: (
        Callable[
            [Mapping[str, Runner], int, Callable[[str, int, int], None]],
            tuple[Mapping[str, Runner], Mapping[str, str]],
        ]
        | None
    ) = None
    controls: Callable[[Sequence[RunResult]], Mapping[str, Any]] | None = None
    judged: Sequence[Mapping[str, Any]] = ()
    qualities: Sequence[Quality] = ()
    extras: Callable[[Sequence[RunResult], RunResults], Mapping[str, Any]] | None = None  # of a row
    batch: int = 1
    is_greedy: bool = False  # so that answers can be compared value for value
    replayed: int = 0  # timed requests whose forwards can be made again alone; 0 = no such thing
    toy_distance: Callable[[str, Mapping[str, Any]], float | None] | None = None  # of recipe, parts
    device: Any = "cpu"
    settings: Mapping[str, Any] = field(default_factory=dict)  # of all requests, for the report
    environment: Mapping[str, Any] = field(default_factory=dict)  # beside what is always reported


class Formatter(Protocol):
    """Between a person and a session: what is typed becomes a request, an output becomes words.

    Made for one model and one set of settings; `mmspec generate`, `bench` and `certify` ask so.
    """

    source: str  # the model as typed

    def request(self, prompts: Sequence[str]) -> dict[str, Any]: ...  # of the customary call
    def text(self, output: Any) -> str | None: ...  # what is printed; None = only files
    def data(self, output: Any) -> dict[str, Any]: ...  # plain data for programs, by name
    def render(self, output: Any, path: Path) -> tuple[Path, ...]: ...  # what is looked at


Outcome = Literal["ok", "note", "refused"]


@dataclass(frozen=True)
class Finding:
    """One thing that `mmspec doctor` looked at: what each model has, and whether that works."""

    check: str
    target: Any
    drafter: Any = None
    verdict: Outcome = "ok"
    remark: str = ""


class Plug(Protocol):
    """The heavy half of a modality: functions of its module `plug`.

    `load` reads a folder, a name on a hub or "zoo:NAME"; it runs no code that lies there, unless
    `trust_remote_code` is given.
    """

    def load(self, source: str | Path, **options: Any) -> Any: ...
    def session(
        self, model: Any, recipe: Recipe, drafter: Any, parts: Mapping[str, Any]
    ) -> Session: ...


class Formatting(Protocol):
    """How people ask models of a modality: functions of its module `asking`.

    `load_drafter` and `formatter` run no code of a folder either. `examine` looks at a model, or at a
    pair, without reading weights into memory.
    """

    def load_drafter(self, model: Any, source: str | Path, **options: Any) -> Any: ...
    def formatter(self, source: str, model: Any, settings: Any, **options: Any) -> Formatter: ...
    def examine(self, target: str, drafter: str | None) -> list[Finding]: ...


class Teacher(Protocol):
    """Asks one model the questions of a data set; `mmspec train` learns from what it answers.

    A *question* is a `mmspec.training.conversations.Question`.
    """

    reader: Any  # the `mmspec.targets.readers.reader.Reader` of the model
    ends: frozenset[int]  # tokens that end an answer
    longest: int | None  # tokens of an answer at most; None = as many as are asked for

    def check(self, questions: Sequence[Any]) -> None: ...  # raises ValueError for what it cannot
    def load_media(self, question: Any) -> Any: ...  # its pictures; raises ValueError if unreadable
    def inputs(
        self, questions: Sequence[Any], opened: Sequence[Any]
    ) -> dict[str, Any]: ...  # of the customary call, (B, L) ids padded on the left
    def tokens(self, answer: str) -> list[int]: ...  # of the data's own answer, with its end


class TrainingData(Protocol):
    """How models of a modality are asked what data hold: functions of `Modality.teaching`."""

    def teacher(self, source: str, model: Any, **options: Any) -> Teacher: ...
    def skeleton(self, source: str) -> Any: ...  # a model without memory
    def names_environment(
        self, data: str
    ) -> bool: ...  # whether data names what a model makes by itself
    def record_episodes(
        self, data: str, teacher: Any, folder: Path, seed: int, progress: Any
    ) -> Path: ...  # such data in a file, made now; progress as of `mmspec.training.reporting`


class Survey(Protocol):
    """What works of a whole library: functions of the module that `Modality.survey` names."""

    def survey(self) -> Iterator[Any]: ...  # one line (a dataclass) per class, as it is measured
    def markdown(self, lines: Sequence[Any]) -> str: ...


@dataclass(frozen=True)
class Selection:
    """Which requests a workload is made of."""

    prompts: Sequence[str] | None  # of the user; None = the zoo's held-out ones
    count: int  # requests in all, at least `batch`
    batch: int
    seed: int
    drafter: Any = None  # a draft model, for peers that take one


class Measures(Protocol):
    """How a modality is measured: functions of its module `measures`.

    It stands above the benchmark and may import it; nothing imports it but by name.
    """

    def workload(
        self, model: Any, formatter: Formatter, settings: Any, selection: Selection
    ) -> Workload: ...
    def certify(self, recipe: Recipe, trial: Any) -> tuple[Recipe, Iterable[Any]]:
        """The recipe as it was bound, and `Check`s out of a `Trial` (`mmspec.bench.certificate`).

        Raises ValueError for a recipe that cannot be tested here.
        """
        ...
