"""The base of what `mmspec.accelerate` returns, and the loop of one of its requests.

Each modality has a final class on this base, with one documented method per call that its models
have: `generate`, `transcribe`, `synthesize`, `generate_images`, `predict_action`, `__call__`. The
classes stand in the module `accelerated` of each modality.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch

from mmspec.decode import decode
from mmspec.draft import Draft, Round
from mmspec.errors import check_number, is_integer, is_of_library, library_message
from mmspec.modality import Call, Modality, Session, View
from mmspec.recipe import Recipe
from mmspec.saving import save
from mmspec.stats import CompileLog, Ledger, Stats
from mmspec.streaming import stream_rounds, take_turns
from mmspec.targets.call_stack import reserve_stack

if TYPE_CHECKING:  # the calls of all modalities, made by tools/surface.py
    from mmspec._surface import Calls
    from mmspec.tracing.trace import Trace
else:
    Calls = object

MIN_STEPS_BEFORE_WARNING = 24
MIN_ACCEPTANCE_LENGTH = 1.1  # below it a warning is due
ROUNDING = 1e-6  # of a mass per token
Observer = Callable[[Round], Any]

log = logging.getLogger("mmspec")


class Accelerated(Calls):
    """A model bound to a recipe.

    `recipe`, `model`, `sees` (what the draft model sees of the prompt) and `last_stats` (the
    statistics of the last request) can be read. Every call takes, beside the model's own arguments,

    - `seed`: makes a request reproducible. With the same seed every exact coupled recipe returns
      the tokens of plain decoding (`mmspec.decode_plain`).
    - `row_ids`: one integer per row, which selects the noise of that row, so that its tokens do not
      depend on the rows it is batched with.
    - `on_round`: a function that is called with every `Round` of verified tokens.
    - `trace`: a new `mmspec.Trace`, which records the rounds for a page to look at.

    As a context manager it disables itself at the end of the `with` block.
    """

    calls: ClassVar[tuple[str, ...]] = ()  # names of the methods below, the customary one first

    def __init__(self, session: Session, modality: Modality, given: Mapping[str, Any]) -> None:
        self.session: Any = session
        self.modality = modality
        self.given = dict(given)  # the parts that the user replaced, for save_pretrained
        self.files: dict[str, Path] = {}  # those that parts name, likewise
        self.last_stats: Stats | None = None
        self.warned = self.is_disabled = False
        self.remake: partial[Accelerated] | None = None  # set by `accelerate`
        if session.signature is not None:  # transformers inspects the signature of custom_generate
            self.__signature__ = session.signature

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        """The call of a pipeline, or the `custom_generate` hook; refused where there is none.

        Raises ValueError for a model without such a call.
        """
        return self._run("__call__", args, arguments)

    def stream(self, *args: Any, **arguments: Any) -> Generator[Round, None, Any]:
        """Run a call and yield each `Round` of verified tokens as soon as it is decoded.

        Args:
            args, arguments: Those of the customary call, the first of `calls`. `call="generate"`
                selects another one.

        Yields:
            `Round`: `tokens` has the new tokens per row; where images or speech are generated,
            `partial()` returns the images or waveforms so far, one per row.

        The generator returns (as the value of its `StopIteration`) what the call returns.
        """
        name = arguments.pop("call", self.calls[0])
        return stream_rounds(lambda observer: self._run(name, args, arguments, observer))

    def disable(self) -> None:
        """From now on calls are the model's own."""
        self.is_disabled = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.disable()

    @property
    def saved_parts(self) -> dict[str, Any]:
        """The parts that `save_pretrained` writes: those that the user gave."""
        return self.given

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the recipe and its draft model, not the target, for `mmspec.load`.

        Raises ValueError for what is no path, and for parts that were made by hand.
        """
        if not isinstance(folder, str | Path) or not str(folder):
            raise ValueError(f"folder={folder!r} must be a path; give a new folder")
        save(self, Path(folder))

    def __copy__(self) -> Self:
        """The same model and session, with statistics of its own."""
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    def __reduce__(self) -> Any:
        """A deep copy or a pickle binds the model again: it holds the arguments of `accelerate`."""
        if self.remake is None:
            return super().__reduce__()
        state = {"last_stats": self.last_stats, "is_disabled": self.is_disabled}
        return _remake, (self.remake.func, self.remake.args, self.remake.keywords), state

    def __repr__(self) -> str:
        name = self.recipe.name or "custom recipe"
        return f"Accelerated({type(self.model).__name__}, {name}, drafter sees {self.sees})"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raises AttributeError that names the calls of this model."""
            if name.startswith("__") or "session" not in self.__dict__:
                raise AttributeError(f"{type(self).__name__} has no {name}")
            raise AttributeError(self._missing_call(name))

    @property
    def model(self) -> Any:
        """The user's model, unchanged."""
        return self.session.model

    @property
    def recipe(self) -> Recipe:
        """The recipe as it was bound to the model."""
        recipe: Recipe = self.session.recipe
        return recipe

    @property
    def sees(self) -> str:
        """What the draft model sees of the prompt."""
        return str(self.session.sees)

    @reserve_stack
    @torch.no_grad()
    def _run(
        self,
        call: str,
        args: Sequence[Any],
        arguments: Mapping[str, Any],
        observer: Observer | None = None,
    ) -> Any:
        """Run one call through the loop. Raises ValueError for a call that the model lacks."""
        if call not in self.calls:
            raise ValueError(self._missing_call(call))
        if self.is_disabled:
            return _call_model(self.model, call, args, arguments)
        arguments = dict(arguments)
        on_round, given = arguments.pop("on_round", None), arguments.pop("trace", None)
        check_call_arguments(arguments.get("seed"), arguments.get("row_ids"), on_round)
        trace = None if given is None else self._begin_trace(given, call, args, arguments)
        observers = [one for one in (observer, on_round) if one is not None]
        loop = RequestLoop(self.model, observers, trace)
        try:
            output = self.session.run(call, args, arguments, loop)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if loop.has_rounds or not is_of_library(error):
                raise
            given = {f"argument {place}": one for place, one in enumerate(args, 1)} | arguments
            request = f"{type(self.model).__name__}.{call}()"
            raise ValueError(library_message(error, request, given)) from error
        self.last_stats = loop.stats()
        if trace is not None:
            trace.finish(self.session, self.modality, output, self.last_stats)
        self._warn(self.last_stats)
        return output

    def _begin_trace(
        self, given: Any, call: str, args: Sequence[Any], arguments: Mapping[str, Any]
    ) -> Trace:
        """Check and start a trace. Raises ValueError for what is none, and for a used one."""
        trace: Trace = import_module("mmspec.tracing.trace").check_trace(given)  # on demand
        about = {
            "call": call,
            "model": Path(self.session.name or type(self.model).__name__).name,
            "recipe": self.recipe.name or "custom",
            "exact": self.recipe.exact,
            "drafter_saw": self.sees,
        }
        trace.begin(self.modality, about, args, arguments)
        return trace

    def _missing_call(self, call: str) -> str:
        calls = ("the object itself" if one == "__call__" else f"{one}()" for one in self.calls)
        known = " or ".join(calls)
        return f"{type(self.model).__name__} has no {call}() here; call {known}"

    def _warn(self, stats: Stats) -> None:
        """Warn once of a recipe that gains nothing: the output is right, so it goes unnoticed."""
        if self.warned:
            return
        if (idle := _describe_idle(stats)) and self.modality.decodes == "tokens":
            self.warned = True
            log.warning("%s; `mmspec show %s` lists its options", idle, stats.recipe)
            return
        is_short = stats.num_spec_steps < MIN_STEPS_BEFORE_WARNING
        if is_short or stats.mean_acceptance_length > MIN_ACCEPTANCE_LENGTH:
            return
        self.warned = True
        remedies = ["give recipe='plain'"]
        if self.recipe.takes_drafter:
            remedies = ["give a draft model that was trained for this target"]
        if self.modality.decodes == "tokens" and "length" in self.modality.parts:
            remedies.append("length='auto', which turns speculation off where it loses")
        log.warning(
            "hardly any of the drafted %s are accepted (acceptance length %.2f over %d steps, the "
            "drafter saw %s): %s",
            *(self.modality.decodes, stats.mean_acceptance_length, stats.num_spec_steps),
            *(stats.drafter_saw, ", or ".join(remedies)),
        )


def _describe_idle(stats: Stats) -> str | None:
    """How a run of a lossy recipe was that of another one; None if it relaxed something."""
    if stats.exact or stats.unverified_tokens or stats.target_calls < MIN_STEPS_BEFORE_WARNING:
        return None
    run = f"{stats.recipe!r} is lossy, but in this run of {stats.target_calls} target calls it"
    if not stats.num_draft_tokens:
        return f"{run} drafted nothing, so this was plain decoding"
    if stats.over_accepted_mass is not None and stats.over_accepted_mass < ROUNDING:
        return f"{run} accepted only what exact verification does"
    return None


class RequestLoop:
    """The `Loop` of one request: it counts rounds and shows them to observers."""

    def __init__(
        self, model: Any, observers: Sequence[Observer], trace: Trace | None = None
    ) -> None:
        self.model, self.observers, self.trace = model, tuple(observers), trace
        self.ledger: Ledger | None = None
        self.has_rounds = False
        self.compiled: CompileLog | None = None
        self.reported: Stats | None = None

    @property
    def is_watched(self) -> bool:
        return bool(self.observers) or self.trace is not None

    def __call__(self, call: Call) -> Iterator[Round]:
        recipe = call.recipe
        if self.ledger is None:  # a request may be several calls: windows of a long recording
            sees = call.parts.drafter.sees
            self.ledger = Ledger(recipe.name or "custom", recipe.exact, sees)
            self.compiled = call.compiled
            if self.compiled is not None:
                self.compiled.start()
        has_partial = call.view is not None and self.observers
        output = PartialOutput(call.view) if call.view is not None and has_partial else None
        if self.trace is not None:
            call = self.trace.follow(call)
        own = decode(call.parts, call.request) if call.rounds is None else call.rounds(call.request)
        for turn in take_turns((self.model, *call.models), self.ledger.follow(own)):
            self.has_rounds = True
            if output is not None:
                turn = output.extend(turn)
            if self.trace is not None:
                self.trace.add(turn)
            for observer in self.observers:
                observer(turn)
            yield turn

    def stats(self) -> Stats:
        if self.reported is not None:
            return self.reported
        assert self.ledger is not None
        found = self.ledger.stats()
        return found if self.compiled is None else self.compiled.add_to(found)

    def report(self, stats: Stats) -> None:
        self.reported = stats

    def show(self, round_: Round, draft: Draft, states: Any) -> None:
        """Show a round of a run without this loop; `states` decodes its states, for traces."""
        self.has_rounds = True
        if self.trace is not None:
            self.trace.show(round_, draft, states)
        for observer in self.observers:
            observer(round_)


class PartialOutput:
    """All tokens of a request so far, so that `Round.partial()` can decode them, also later.

    `partial()` costs one pass of the image decoder. Cells without a token are grey; the others are
    decoded without them, so their edges may change. After the last round these are the images that
    the call returns.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self.rows: list[list[Any]] = []

    def extend(self, turn: Round) -> Round:
        """The round, with a `partial` that decodes all tokens up to it."""
        self.rows = self.rows or [[] for _ in turn.tokens]
        for row, new in zip(self.rows, turn.tokens, strict=True):
            row.extend(new)
        ends = [len(row) for row in self.rows]
        return replace(turn, partial=partial(self._decode, ends))

    @torch.no_grad()
    def _decode(self, ends: Sequence[int]) -> Any:
        return self.view([row[:end] for row, end in zip(self.rows, ends, strict=True)])


def _remake(function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    return function(*args, **keywords)


def _call_model(model: Any, call: str, args: Sequence[Any], arguments: Mapping[str, Any]) -> Any:
    """The model's own output. Raises ValueError for arguments that only mmspec takes."""
    ours = sorted({"seed", "row_ids", "on_round", "trace"} & set(arguments))
    if ours:
        raise ValueError(
            f"{', '.join(ours)} is an argument of mmspec, and this object was disabled; drop it, "
            "or call accelerate() again"
        )
    if call != "__call__" and not hasattr(model, call):
        raise ValueError(
            f"{type(model).__name__} itself has no {call}(), and this object was disabled; call "
            "accelerate() again"
        )
    return (model if call == "__call__" else getattr(model, call))(*args, **arguments)


def check_call_arguments(seed: Any, row_ids: Any, on_round: Any) -> None:
    """Check the arguments that mmspec adds to every call. Raises ValueError."""
    if seed is not None:
        check_number("seed", seed, whole=True, example=0)
    if row_ids is not None:
        row_ids = row_ids.tolist() if isinstance(row_ids, np.ndarray) else row_ids
        listed = isinstance(row_ids, Sequence) and not isinstance(row_ids, str | bytes)
        if not listed or not all(is_integer(one) for one in row_ids):
            raise ValueError(f"row_ids={row_ids!r} are not whole numbers; give one per row")
    if on_round is not None and not callable(on_round):
        raise ValueError(f"on_round={on_round!r} cannot be called; give a function of a Round")
