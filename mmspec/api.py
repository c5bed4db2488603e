"""The public surface: `accelerate` a model, then ask it as before.

fast = mmspec.accelerate(model, recipe="coupled", drafter=small)
out = fast.generate(**inputs, max_new_tokens=64)
out.sequences, out.stats
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmspec import recipes, registry, zoo
from mmspec.decode import decode
from mmspec.draft import Round, Verifier
from mmspec.errors import (
    check_like,
    check_number,
    is_of_library,
    is_whole,
    library_message,
    unknown_message,
)
from mmspec.modality import Call, Modality, Session, View
from mmspec.recipe import Recipe
from mmspec.saving import restore, save
from mmspec.stats import Ledger, Stats
from mmspec.streaming import in_turn, streamed
from mmspec.verifiers import named

PARTS = ("recipe", "drafter", "verifier", "modality")
WATCHED = 24  # steps after which an acceptance of next to nothing is worth a word
Observer = Callable[[Round], Any]

log = logging.getLogger("mmspec")


def accelerate(
    model: Any,
    recipe: str | Recipe | None = None,
    *,
    drafter: Any = None,
    verifier: Verifier | str | None = None,
    modality: str | None = None,
    **parts: Any,
) -> Accelerated:
    """Make a model generate faster by speculation.

    `model` is a model of transformers, a pipeline of diffusers, or a folder, a hub name or
    "zoo:NAME" of one. `recipe` is a name (see `mmspec.recipes.names()`), a `Recipe`, or None: the
    usual one of the model's modality. `drafter` is what the recipe drafts with (a model, a folder,
    "zoo:NAME") or a `Drafter`; a model named "zoo:NAME" brings the zoo's own. `parts` replace parts
    of the recipe, each where the modality has it: `tree`, `length`, `sees`, `compressor` for
    tokens, `processor` where they are drawn, `window`, `tree`, `max_rows` for pipelines; others are
    the recipe's own knobs. `modality` decides where a model has several. Nothing is written onto
    the model.

    Raises ValueError, before anything runs, for parts that do not fit: unknown names, different
    vocabularies, a proposal kind the verifier is biased for, a cache that cannot roll back.
    """
    owner = registry.find_modality(model, modality)
    plug, plan = registry.plug(owner), select_recipe(owner, recipe, drafter is not None)
    if isinstance(model, str | Path):
        drafter = zoo.drafter_for(str(model), plan) if drafter is None else drafter
        model = plug.load(model)
    recipes.check_decodes(plan, owner.all_decodes, model, owner.unsupported_options)
    unknown = sorted(set(parts) - {*owner.parts, *plan.options})
    if unknown:
        known = [*PARTS, *owner.parts, *plan.options]
        where = f"accelerate() of {owner.name} with recipe {plan.name or 'custom'!r}"
        raise ValueError(unknown_message(unknown, known, where))
    given = {name: value for name, value in parts.items() if value is not None}
    if isinstance(verifier, str):
        given["verifier"], verifier = verifier, named(verifier)
    elif verifier is not None:
        _check_verifier(verifier)
        given["verifier"] = verifier
    options = {name: value for name, value in parts.items() if name in plan.options}
    for name, value in options.items():
        check_like(name, value, plan.options[name])
    plan = replace(plan, verifier=verifier or plan.verifier, options={**plan.options, **options})
    own = {name: value for name, value in given.items() if name in owner.parts}
    return Accelerated(plug.session(model, plan, drafter, own), owner, given)


def select_recipe(owner: Modality, recipe: str | Recipe | None, is_drafted: bool) -> Recipe:
    """The recipe by name, itself, or the usual one. Raises ValueError for what is none."""
    if recipe is None:
        recipe = (
            owner.recipe_with_drafter if is_drafted and owner.recipe_with_drafter else owner.recipe
        )
    if isinstance(recipe, str):
        return recipes.get(recipe)
    if not isinstance(recipe, Recipe):
        raise ValueError(
            f"recipe={recipe!r} is neither a name nor a Recipe; see mmspec.recipes.names()"
        )
    return recipe


class Accelerated:
    """A model bound to a recipe; it is asked as the model itself is.

    `generate`, a call, or what else the session of its modality declares (`Session.calls`:
    `generate_images`, `synthesize`, `transcribe`, `predict_action`) takes what the model takes, and
    beside it

    - `seed`: reproduces a run. Every exact coupled recipe returns, for the same seed, what plain
      decoding returns. `row_ids` (one number per row) say whose noise each row gets: with them a
      row does not depend on what it is batched with.
    - `on_round`: called with every `Round` of verified tokens.

    `stream` yields those rounds instead; where tokens are drawn or spoken, `partial()` of a round
    are the pictures or the sound so far, one per row. `last_stats` are the statistics of the last
    run.
    """

    def __init__(self, session: Session, modality: Modality, given: Mapping[str, Any]) -> None:
        self.session: Any = session  # of its modality; see its own class for what it offers
        self.modality = modality
        self.given = dict(given)  # the parts that the user replaced, for save_pretrained
        self.last_stats: Stats | None = None
        self.warned = self.is_disabled = False
        if session.signature is not None:  # what inspect.signature gives to transformers
            self.__signature__ = session.signature

    def generate(self, *args: Any, **arguments: Any) -> Any:
        """Generate as the model does, with its arguments and output, and `stats` on that."""
        return self._run("generate", args, arguments)

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        """As a pipeline is called; or as the `custom_generate` hook of `model.generate`."""
        return self._run("__call__", args, arguments)

    def stream(self, *args: Any, **arguments: Any) -> Generator[Round, None, Any]:
        """The same, one `Round` of verified tokens at a time, asked in the customary way.

        A model that writes and draws draws; `call="generate"` makes it write. The iterator returns
        (as the value of its StopIteration) what the call returns.
        """
        name = arguments.pop("call", self.session.calls[0])
        return streamed(lambda watch: self._run(name, args, arguments, watch))

    def __getattr__(self, name: str) -> Any:
        """A call or a method that the session declares. Raises AttributeError for any other."""
        session = self.__dict__.get("session")  # none yet while it is copied or unpickled
        if session is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no {name}")
        if name in session.methods:
            return getattr(session, name)
        if name not in session.calls:
            raise AttributeError(self._refusal(name))

        def asked(*args: Any, **arguments: Any) -> Any:
            return self._run(name, args, arguments)

        asked.__name__, asked.__doc__ = name, session.run.__doc__
        return asked

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.session.calls, *self.session.methods})

    def disable(self) -> None:
        """From now on calls are the model's own; also at the end of a `with` block."""
        self.is_disabled = True

    def __enter__(self) -> Accelerated:
        return self

    def __exit__(self, *error: object) -> None:
        self.disable()

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the recipe and its drafter (not the target) for `mmspec.load`."""
        save(self, Path(folder))

    def __repr__(self) -> str:
        name = self.recipe.name or "custom recipe"
        return f"Accelerated({type(self.model).__name__}, {name}, drafter sees {self.sees})"

    @property
    def model(self) -> Any:
        return self.session.model

    @property
    def recipe(self) -> Recipe:
        recipe: Recipe = self.session.recipe
        return recipe

    @property
    def sees(self) -> str:
        """What the drafter sees of the prompt."""
        return str(self.session.sees)

    @torch.no_grad()
    def _run(
        self,
        call: str,
        args: Sequence[Any],
        arguments: Mapping[str, Any],
        stream: Observer | None = None,
    ) -> Any:
        if call not in self.session.calls:
            raise ValueError(self._refusal(call))
        if self.is_disabled:
            return _call_model(self.model, call, args, arguments)
        arguments = dict(arguments)
        own = arguments.pop("on_round", None)
        check_call_arguments(arguments.get("seed"), arguments.get("row_ids"), own)
        run = Run(self.model, [watch for watch in (stream, own) if watch is not None])
        try:
            output = self.session.run(call, args, arguments, run)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if run.has_rounds or not is_of_library(error):
                raise
            given = {**{str(place): one for place, one in enumerate(args)}, **arguments}
            asked = f"{type(self.model).__name__}, asked by {call}(),"
            raise ValueError(library_message(error, asked, given)) from error
        self.last_stats = run.stats()
        self._warn(self.last_stats)
        return output

    def _refusal(self, call: str) -> str:
        known = " or ".join(f"{name}()" for name in self.session.calls)
        return f"{type(self.model).__name__} is not asked by {call}(); call {known}"

    def _warn(self, stats: Stats) -> None:
        """Warn once when hardly anything is accepted: the output is right, so nobody notices."""
        if self.warned or stats.num_spec_steps < WATCHED or stats.mean_acceptance_length > 1.1:
            return
        self.warned = True
        log.warning(
            "hardly any drafted token is accepted (acceptance length %.2f over %d steps, the "
            "drafter saw %s): check that it shares the target's tokenizer and sees the picture, or "
            "give length='auto', which turns speculation off where it loses",
            *(stats.mean_acceptance_length, stats.num_spec_steps, stats.drafter_saw),
        )


class Run:
    """The loop of one request: counts its rounds, and shows them to whoever watches."""

    def __init__(self, model: Any, watches: Sequence[Observer]) -> None:
        self.model, self.watches = model, tuple(watches)
        self.ledger: Ledger | None = None
        self.has_rounds = False
        self.reported: Stats | None = None

    @property
    def is_watched(self) -> bool:
        return bool(self.watches)

    def __call__(self, call: Call) -> Iterator[Round]:
        recipe = call.recipe
        if self.ledger is None:  # a request may be several calls: windows of a long sound
            sees = call.parts.drafter.sees
            self.ledger = Ledger(recipe.name or "custom", recipe.exact, sees)
        seen = PartialOutput(call.view) if call.view is not None and self.watches else None
        rounds = self.ledger.follow(decode(call.parts, call.request))
        for kept in in_turn((self.model, *call.models), rounds):
            self.has_rounds = True
            if seen is not None:
                kept = seen.shown(kept)
            for watch in self.watches:
                watch(kept)
            yield kept

    def stats(self) -> Stats:
        if self.reported is not None:
            return self.reported
        assert self.ledger is not None
        return self.ledger.stats()

    def report(self, stats: Stats) -> None:
        self.reported = stats


class PartialOutput:
    """All tokens of a request, so that each of its rounds can be looked at, also later.

    `partial()` of a round costs one pass of the picture decoder. Cells that are still open are
    grey; the others are decoded without them, so their edges may change. After the last round
    these are the pictures that the call returns.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self.rows: list[list[Any]] = []

    def shown(self, kept: Round) -> Round:
        """The round, with what there is up to it."""
        self.rows = self.rows or [[] for _ in kept.tokens]
        for row, new in zip(self.rows, kept.tokens, strict=True):
            row.extend(new)
        ends = [len(row) for row in self.rows]
        return replace(kept, partial=partial(self._at, ends))

    @torch.no_grad()
    def _at(self, ends: Sequence[int]) -> Any:
        return self.view([row[:end] for row, end in zip(self.rows, ends, strict=True)])


def _call_model(model: Any, call: str, args: Sequence[Any], arguments: Mapping[str, Any]) -> Any:
    """What the model itself answers. Raises ValueError for arguments that only we take."""
    ours = sorted({"seed", "row_ids", "on_round"} & set(arguments))
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
    """Refuse what the arguments of ours can not be. Raises ValueError."""
    if seed is not None:
        check_number("seed", seed, whole=True, example=0)
    if row_ids is not None:
        row_ids = row_ids.tolist() if isinstance(row_ids, np.ndarray) else row_ids
        listed = isinstance(row_ids, Sequence) and not isinstance(row_ids, str)
        if not listed or not all(is_whole(one) for one in row_ids):
            raise ValueError(f"row_ids={row_ids!r} are no whole numbers; give one per row")
    if on_round is not None and not callable(on_round):
        raise ValueError(f"on_round={on_round!r} cannot be called; give a function of a Round")


def _check_verifier(verifier: Any) -> None:
    if not isinstance(verifier, Verifier):
        raise ValueError(
            f"verifier={verifier!r} is no verifier; give a name, such as 'coupled', or an object "
            "of mmspec.verifiers"
        )


def decode_plain(model: Any, **arguments: Any) -> Any:
    """Plain decoding, one token per forward, under the same noise as every exact coupled recipe.

    Of a modality without tokens, what speculates nothing there. Raises what `accelerate` raises.
    """
    recipe, parts = registry.find_modality(model).plain
    return accelerate(model, recipe, **parts).generate(**arguments)


def load(folder: str | Path, model: Any = None, **parts: Any) -> Accelerated:
    """Load what `save_pretrained` saved; without `model`, the target that the file names.

    `parts` are added to those saved or take their place: `processor`, `codec` and `codes`, which
    belong to the target and are never saved. Raises ValueError where the folder holds none, or the
    target is unknown.
    """
    if not isinstance(folder, str | Path):
        raise ValueError(f"folder={folder!r} is none; give one that save_pretrained wrote")
    return accelerate(**{**restore(Path(folder), model), **parts})
