"""A dynamic tree respects its sizes and drafts the most probable nodes."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch

from mmspec.draft import Draft, Kind
from mmspec.drafters.neural.shared import SharedBackbone
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.drafters.trees.dynamic_tree import BeamMass, DynamicTree
from mmspec.targets.tokens.context import Context
from tests.drafters.driving import drive, greedy, inputs, tiny
from tests.toys.readers import backbone

ROOM = 4


@pytest.mark.parametrize("nodes", [3, 7, 50])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_keeps_to_its_sizes_and_to_what_can_be_kept(nodes: int, temperature: float) -> None:
    """Of three paths a level 3, 9 and 9 candidates are scored; the best of them are drafted."""
    model = tiny()
    shape = DynamicTree(depth=4, beam=3, nodes=nodes)
    drafter = Autoregressive(SharedBackbone(backbone(model), depth=1), shape, Kind.RACE)
    hot = {"do_sample": True, "temperature": temperature} if temperature else {}
    text, rounds = drive(model, drafter, inputs(), ROOM, **hot)
    said = 0
    for turn in rounds:
        left = ROOM - said - 1  # every round adds a token of the target's own
        if turn.index and left:
            levels = min(4, left)
            assert turn.drafted == (min(nodes, 3 + 9 * (levels - 1)),)
            assert turn.depth <= levels
        said += len(turn.tokens[0])
    assert len(text[0]) == ROOM


class Watched(Autoregressive):
    """Records its drafts and the texts they were made for."""

    drafts: ClassVar[list[tuple[Draft, list[int]]]] = []

    def propose(self, context: Context, state: Any) -> Draft:
        draft = super().propose(context, state)
        self.drafts.append((draft, [*context.history[0]]))
        return draft


def test_it_drafts_the_likeliest_nodes() -> None:
    """As a search by hand finds them: the best three paths of a level grow, the best six stay."""
    model = tiny()
    whole = SharedBackbone(backbone(model), depth=2)
    drive(model, Watched(whole, DynamicTree(3, 3, 6), Kind.DET), inputs(), 8)
    draft, text = Watched.drafts[0]
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens[0].tolist(), draft.parents[0].tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    assert set(found) == by_hand(model, text, depth=3, beam=3, nodes=6)


@torch.no_grad()
def by_hand(model: Any, text: list[int], depth: int, beam: int, nodes: int) -> set[tuple[int, ...]]:
    front: list[tuple[int, ...]] = [()]
    scored: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(depth):
        grown = dict[tuple[int, ...], float]()
        for path in front:
            distribution = (
                model(input_ids=torch.tensor([[*text, *path]])).logits[0, -1].log_softmax(-1)
            )
            for value, token in zip(
                *(part.tolist() for part in distribution.topk(beam)), strict=True
            ):
                grown[*path, token] = scored[path] + value
        front = sorted(grown, key=grown.__getitem__, reverse=True)[:beam]
        scored |= grown
    del scored[()]
    return {*sorted(scored, key=scored.__getitem__, reverse=True)[:nodes]}


def test_a_front_without_mass_ends_the_tree() -> None:
    """DDD: asked after 2 levels; a limit above 0 is never reached, one of -inf always."""
    model = tiny()
    whole = SharedBackbone(backbone(model), depth=1)
    depths = {}
    for limit in (0.5, -math.inf):
        shape = DynamicTree(5, 3, 9, stop=BeamMass(limit, first=2))
        Watched.drafts.clear()
        text, _ = drive(model, Watched(whole, shape, Kind.DET), inputs(), 12)
        assert text == greedy(model, inputs(), 12)
        depths[limit] = max(draft.max_depth or 0 for draft, _ in Watched.drafts)
    assert depths == {0.5: 2, -math.inf: 5}


def test_the_mass_is_that_of_all_paths_of_the_largest_row() -> None:
    """Wrong: the best path alone, the smallest row, or every level."""
    many, few = [0.2, 0.2], [0.3, 0.05]  # log mass -0.9 and -1.05
    stop = BeamMass(limit=-1.0, first=3, every=2)
    for levels, rows, wanted in (
        *((3, [many], False), (3, [few], True), (3, [few, many], False), (3, [few, few], True)),
        *((2, [few], False), (4, [few], False), (5, [few], True)),
    ):
        assert stop.ends_at(levels, torch.tensor(rows).log()) is wanted
