"""A chain bound to a recipe: what `mmspec.accelerate` hands requests to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from markov_modality.model import MarkovChain
from markov_modality.walking import ChainTable, WalkRequest
from mmspec.decode import Parts
from mmspec.distributions.noise import KeyedNoise, fresh_seed
from mmspec.draft_models import draft_model
from mmspec.drafters.shapes import shape_of
from mmspec.modality import Call, Loop, parse_settings, setting
from mmspec.recipe import Kit, Recipe, pair, resolve
from mmspec.stats import Stats
from mmspec.targets.stop import Stop


@dataclass(frozen=True)
class Walked:
    """What `generate` returns."""

    states: Tensor  # (B, 1 + days): where each row began, and where it went
    stats: Stats


@dataclass(frozen=True)
class Asked:
    """What `generate` takes."""

    start: Sequence[int]  # a state per row
    days: int = setting(24, "States to walk on.", min=1)
    temperature: float = setting(1.0, "0 always takes the likeliest state.", min=0)
    seed: int | None = None
    row_ids: Sequence[int] | None = None


@dataclass(frozen=True)
class MarkovSession:
    """`generate(start=[0, 2], days=10)`: from states 0 and 2, ten states on."""

    model: MarkovChain
    recipe: Recipe
    small: Any = None  # the draft model, where the recipe takes one
    calls: ClassVar[tuple[str, ...]] = ("generate",)
    methods: ClassVar[tuple[str, ...]] = ()
    signature: ClassVar[None] = None
    sees: ClassVar[str] = "nothing"

    @property
    def name(self) -> str | None:
        return self.model.name_or_path or None

    def run(
        self, call: str, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop
    ) -> Walked:
        if args:
            raise ValueError("generate() takes its arguments by name; give start=")
        asked = parse_settings(Asked, arguments)
        rows, request = [[state] for state in asked.start], self._request(asked)
        parts, recipe = self.bind(asked.days, asked.temperature)
        for kept in loop(Call(parts, request, recipe)):
            for row, new in zip(rows, kept.tokens, strict=True):
                row.extend(new)
        return Walked(torch.tensor(rows), loop.stats())

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

    def _request(self, asked: Asked) -> WalkRequest:
        if not asked.start or not all(0 <= state < self.model.states for state in asked.start):
            most = self.model.states - 1
            raise ValueError(f"start={asked.start} are no states; give one per row, 0 to {most}")
        seed = fresh_seed() if asked.seed is None else asked.seed
        noise = KeyedNoise.seeded(seed, len(asked.start), torch.device("cpu"), asked.row_ids)
        return WalkRequest(tuple(asked.start), noise)


def session(
    model: MarkovChain, recipe: Recipe, drafter: Any, parts: Mapping[str, Any]
) -> MarkovSession:
    """A chain bound to a recipe. Raises ValueError for parts that do not fit."""
    shape = shape_of(recipe.execution, None, parts.get("length"))
    small = draft_model(recipe, drafter, ChainTable(model))
    bound = MarkovSession(model, replace(recipe, execution=shape), small)
    bound.bind(1, 1.0)  # what cannot be is refused now
    return bound
