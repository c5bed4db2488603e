"""A Markov chain bound to a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from markov_modality.model import MarkovChain
from markov_modality.walking import ChainTable, WalkRequest
from mmspec.accelerated import Accelerated
from mmspec.decode import Parts
from mmspec.distributions.noise import KeyedNoise, fresh_seed
from mmspec.draft_models import draft_model
from mmspec.drafters.shapes import shape_of
from mmspec.modality import Call, Loop, parse_settings, setting
from mmspec.recipe import Kit, Recipe, pair, resolve
from mmspec.stats import Stats
from mmspec.targets.stop import Stop


@dataclass(frozen=True)
class WalkOutput:
    """The output of `generate`."""

    states: Tensor  # (B, 1 + days): where each row began, and where it went
    stats: Stats


@dataclass(frozen=True)
class WalkOptions:
    """Arguments of `generate`."""

    start: Sequence[int]  # a state per row
    days: int = setting(24, "States to walk on.", min=1)
    temperature: float = setting(1.0, "0 always takes the likeliest state.", min=0)
    seed: int | None = None
    row_ids: Sequence[int] | None = None


class AcceleratedChain(Accelerated):
    """What `mmspec.accelerate` returns for a chain."""

    calls: ClassVar[tuple[str, ...]] = ("generate",)

    def generate(self, **arguments: Any) -> WalkOutput:
        """Walk on from the states `start`, for `days`, at a `temperature`."""
        return self._run("generate", (), arguments)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class MarkovSession:
    """`generate(start=[0, 2], days=10)`: from states 0 and 2, ten states on."""

    model: MarkovChain
    recipe: Recipe
    small: Any = None  # the draft model, where the recipe takes one
    interface: ClassVar[type[Accelerated]] = AcceleratedChain
    signature: ClassVar[None] = None
    sees: ClassVar[str] = "nothing"

    @property
    def name(self) -> str | None:
        return self.model.name_or_path or None

    def run(
        self, call: str, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop
    ) -> WalkOutput:
        if args:
            raise ValueError("generate() takes its arguments by name; give start=")
        options = parse_settings(WalkOptions, arguments)
        rows, request = [[state] for state in options.start], self._request(options)
        parts, recipe = self.bind(options.days, options.temperature)
        for round_ in loop(Call(parts, request, recipe)):
            for row, new in zip(rows, round_.tokens, strict=True):
                row.extend(new)
        return WalkOutput(torch.tensor(rows), loop.stats())

    def bind(self, days: int, temperature: float) -> tuple[Parts, Recipe]:
        """What the loop runs, and the recipe as it was bound. Raises ValueError for misfits."""
        target = ChainTable(self.model, temperature)
        draft = None if self.small is None else ChainTable(self.small.model, temperature)
        kit = Kit(target, draft, self.recipe.execution, self.sees, None, self.recipe.options)
        verifier, gate = resolve(self.recipe.verifier, kit), resolve(self.recipe.gate, kit)
        drafter = pair(self.recipe.architecture(kit), verifier, target)
        recipe = replace(self.recipe, verifier=verifier, gate=gate)
        return Parts(target, drafter, verifier, Stop(days), gate), recipe

    def save(self, folder: Path) -> None:
        if self.small is not None:
            self.small.save(folder, self.model, None)

    def _request(self, options: WalkOptions) -> WalkRequest:
        if not options.start or not all(0 <= state < self.model.states for state in options.start):
            last = self.model.states - 1
            raise ValueError(f"start={options.start} are not states; give one per row, 0 to {last}")
        seed = fresh_seed() if options.seed is None else options.seed
        noise = KeyedNoise.from_seed(seed, len(options.start), torch.device("cpu"), options.row_ids)
        return WalkRequest(tuple(options.start), noise)


def session(
    model: MarkovChain, recipe: Recipe, drafter: Any, parts: Mapping[str, Any]
) -> MarkovSession:
    """A chain bound to a recipe. Raises ValueError for parts that do not fit."""
    shape = shape_of(recipe.execution, None, parts.get("length"))
    small = draft_model(recipe, drafter, ChainTable(model))
    bound = MarkovSession(model, replace(recipe, execution=shape), small)
    bound.bind(1, 1.0)  # refuses parts that do not fit
    return bound
