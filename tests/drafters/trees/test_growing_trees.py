"""Best-first, entropy and adaptive trees."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

import mmspec
from mmspec.draft import Draft, Kind
from mmspec.drafters.draft_model import DraftNodes
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.shared import SharedBackbone
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.drafters.shapes import Chain, Shape, _plan, shape_of
from mmspec.drafters.trees.auto_tree import AutoTree
from mmspec.drafters.trees.best_first import BestFirstTree
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.drafters.trees.entropy_tree import EntropyTree
from mmspec.targets.tokens.context import Context
from mmspec.trees import Tree
from tests import toys
from tests.covering import covering, limited
from tests.drafters.driving import drive, greedy, inputs, tiny
from tests.toys.readers import backbone

SHAPES: dict[str, Shape] = {
    "step": BestFirstTree(nodes=9, depth=4, step=0.5, branch=3),
    "dijkstra": BestFirstTree(nodes=6, depth=4, step=0.0, branch=2),
    "confident": BestFirstTree(nodes=12, depth=3, step=math.inf, branch=4, threshold=0.3),
    "entropy": EntropyTree(depth=(1, 4), width=(1, 3), nodes=8, sure=0.1, unsure=0.9),
    "auto": AutoTree(nodes=8, depth=4),
}


class ShapeWatcher(Autoregressive):
    """Records its drafts and the texts they were made for."""

    drafts: ClassVar[list[tuple[Draft, list[list[int]]]]] = []

    def propose(self, context: Context, state: Any) -> Draft:
        draft = super().propose(context, state)
        self.drafts.append((draft, [[*text] for text in context.history]))
        return draft


def watched(shape: Shape, depth: int = 2, rows: int = 1, room: int = 8) -> list[Any]:
    ShapeWatcher.drafts.clear()
    model = tiny()
    whole = SharedBackbone(backbone(model), depth=depth)
    prompt = inputs((0, 3, 5)[:rows])
    text, _ = drive(model, ShapeWatcher(whole, shape, Kind.DET), prompt, room)
    assert text == greedy(model, prompt, room)
    return list(ShapeWatcher.drafts)


def paths(draft: Draft, row: int = 0) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    pairs = zip(draft.tokens[row].tolist(), draft.parents[row].tolist(), strict=True)
    for token, parent in pairs:
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return [path for path, real in zip(found, draft.mask[row].tolist(), strict=True) if real]


@pytest.mark.parametrize(("name", "rows"), limited(covering(tuple(SHAPES), (3, 1), strength=1), 3))
def test_output_is_the_targets(name: str, rows: int) -> None:
    """Greedy, with a drafter that reads one layer of two, padded rows among them."""
    assert watched(SHAPES[name], depth=1, rows=rows, room=24)


@pytest.mark.parametrize(
    ("name", "family"), covering(tuple(SHAPES), ("llava", "qwen2_5_vl"), strength=1)
)
def test_a_seed_gives_what_plain_decoding_gives(family: str, name: str) -> None:
    model = toys.model(family)
    given = toys.inputs(family, batch=3, ragged=True)
    how = {"max_new_tokens": 10, "do_sample": True, "seed": 5}
    plain = mmspec.accelerate(model, "plain").generate(**given, **how)
    fast = mmspec.accelerate(model, "coupled", drafter=model, tree=SHAPES[name])
    out = fast.generate(**given, **how)
    assert out.stats.fallback is None
    assert torch.equal(plain.sequences, out.sequences)


# --- the search -----------------------------------------------------------------------------------


# --- entropy --------------------------------------------------------------------------------------


# --- what pays ------------------------------------------------------------------------------------


def test_shapes_are_known_by_name() -> None:
    assert isinstance(shape_of(None, "auto", None), AutoTree)
    assert shape_of(None, "best-first", None) == BestFirstTree()
    assert shape_of(None, "entropy", None) == EntropyTree()
    assert shape_of(None, "dynamic", None) == DynamicTree()
    with pytest.raises(ValueError, match="'best-first', 'c2t', 'entropy', 'parallel'"):
        shape_of(None, "bushy", None)


def test_the_longest_path_is_known_before() -> None:
    max_depth = {name: shape.max_depth for name, shape in SHAPES.items()}
    assert max_depth == {"step": 4, "dijkstra": 4, "confident": 3, "entropy": 4, "auto": 4}
    assert Chain(Fixed(4)).max_depth == 4
    assert replace(BestFirstTree(), depth=2).max_depth == 2


@torch.no_grad()
def test_levels_placed_at_once_have_the_masks_and_positions_of_single_ones() -> None:
    """Also where another block was read in between, so that the later levels are placed alone."""
    small = toys.model("llama")
    body: Any = mmspec.accelerate(small, "plain").session.bound.backbone
    first, other = (body.prefill(toys.inputs("llama"), 64)[0] for _ in range(2))
    tree = Tree.branching([3, 2, 2, 1])
    levels = [level.indices_on(torch.device("cpu")).layout for level in _plan(tree) if level.inner]
    for interrupted in (len(levels), 2):
        for index, layout in enumerate(levels):
            tokens = torch.zeros(1, layout.depths.shape[1], dtype=torch.int64)
            block = DraftNodes(tokens, layout).block(first.like)
            assert block.series is not None
            if index == interrupted:
                first.place(replace(block, series=None))
            positions, mask, _ = first.place(block)
            alone = other.place(replace(block, series=None))
            assert torch.equal(positions, alone[0])
            assert torch.equal(mask, alone[1])
