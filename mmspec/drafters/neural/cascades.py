"""Cascades of draft models as recipes name them, and the planner of their levels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

from mmspec.draft import Drafter
from mmspec.drafters.draft_model import DraftModel
from mmspec.drafters.neural.draft_inputs import build_draft_inputs
from mmspec.drafters.neural.kv import kv_of
from mmspec.drafters.neural.nested import Nested, Search
from mmspec.drafters.neural.shared import SharedBackbone
from mmspec.drafters.neural.small_model import SMALL_MODEL, SmallModel
from mmspec.drafters.shapes import Chain
from mmspec.errors import check_number
from mmspec.recipe import Kit
from mmspec.targets.readers.reader import Reader

LONGEST = 8  # of a level, in `plan_cascade`


@dataclass(frozen=True)
class CascadePlan:
    """A cascade: its levels, how many tokens each drafts, and the time per token it predicts."""

    levels: tuple[int, ...]  # indices of the models, the target (0) first
    lengths: tuple[int, ...]  # of every level below the target
    seconds: float  # per token


def plan_cascade(
    seconds: Sequence[float], agreement: Mapping[tuple[int, int], float], longest: int = LONGEST
) -> CascadePlan:
    """The fastest cascade of measured models (Polybasic, Wang et al. 2025).

    `seconds[i]` is the time of a forward of model i, the target first, and `agreement[i, j]` the
    probability that i accepts a token of j (1 - TV). A level that verifies drafts of n tokens
    emits (1 - a^(n + 1)) / (1 - a) per forward and needs them from the level below:

        time per token of level i = (seconds of a forward + n x time per token of level j) / that

    All orders from large to small and all lengths up to `longest` are tried, which subsumes the
    paper's criterion for the insertion of one model. Reconstructed: the paper measures accepted
    lengths, here they follow from the agreement.
    """
    count = len(seconds)
    if not count or min(seconds) <= 0:
        raise ValueError(
            f"seconds={list(seconds)} must be positive times, that of the target first"
        )
    chains = [(0, *below) for size in range(count) for below in combinations(range(1, count), size)]
    plans = [
        CascadePlan(chain, lengths, _predict(chain, lengths, seconds, agreement))
        for chain in chains
        for lengths in product(range(1, longest + 1), repeat=len(chain) - 1)
    ]
    return min(plans, key=lambda plan: plan.seconds)


def _predict(
    chain: Sequence[int],
    lengths: Sequence[int],
    seconds: Sequence[float],
    agreement: Mapping[tuple[int, int], float],
) -> float:
    time = seconds[chain[-1]]
    for upper, lower, length in reversed([*zip(chain, chain[1:], lengths, strict=False)]):
        rate = agreement[upper, lower]
        emitted = length + 1 if rate >= 1 else (1 - rate ** (length + 1)) / (1 - rate)
        time = (seconds[upper] + length * time) / emitted
    return time


def cascade_with_search(kit: Kit) -> Drafter:
    """A small model, helped by a search in the text, which also drafts the tokens after it."""
    search = Search(kit.options["longest"], frozenset(kit.target.visual_ids))
    lengths = (_first_length(kit), kit.options["inner"])
    return Nested((_small_model(kit),), lengths, search, kit.options["tail"])


def cascade_in_cache(kit: Kit) -> Drafter:
    """The target on a part of its cache, helped by a small model."""
    middle = SharedBackbone(kit.target, kv=kv_of(kit))
    lengths = (_first_length(kit), kit.options["inner"])
    return Nested((middle, _small_model(kit)), lengths)


def cascade_of_models(kit: Kit) -> Drafter:
    """The draft model, and the models in `models` below it, from large to small."""
    given, lengths = kit.options["models"], tuple(kit.options["lengths"])
    models = (_small_model(kit), *(_small_model(kit, one) for one in given))
    search = None if given else Search(ignore=frozenset(kit.target.visual_ids))
    levels = len(models) + (search is not None)
    check_number("levels", len(lengths), levels - 1, levels - 1, whole=True, example=levels - 1)
    return Nested(models, (_first_length(kit), *lengths), search)


def _small_model(kit: Kit, given: Any = None) -> DraftModel:
    """The draft model of the kit, or another one bound to the same target."""
    if given is None:
        if not isinstance(kit.drafter, Reader):
            raise ValueError("a cascade needs whole draft models; give drafter= one, not a head")
        _check_branches(kit.drafter)
        return SmallModel(kit.drafter, build_draft_inputs(kit))
    model = SMALL_MODEL.load(given, kit.target) if isinstance(given, str | Path) else given
    sees = SMALL_MODEL.default_sees(model, kit.target, "auto")
    own = replace(kit, drafter=SMALL_MODEL.read(model, kit.target, sees), sees=sees)
    assert own.drafter is not None
    _check_branches(own.drafter)
    return SmallModel(own.drafter, build_draft_inputs(own))


def _check_branches(reader: Reader) -> None:
    """Refuse a model that cannot take tokens back within a draft. Raises ValueError."""
    if not reader.can_branch:
        raise ValueError(
            f"{type(reader.model).__name__} {reader.obstacle}, and models of a cascade take tokens "
            "back within a draft; choose another model, or recipe='coupled'"
        )


def _first_length(kit: Kit) -> int:
    """Tokens of the target's draft. Raises ValueError for a tree."""
    if not isinstance(kit.shape, Chain):
        raise ValueError("a cascade drafts chains; give length= instead of tree=")
    return kit.shape.length.max_length
