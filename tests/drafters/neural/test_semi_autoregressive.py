"""A semi-autoregressive head: its blocks are those of a slow reference, and its output exact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import mmspec
from mmspec import recipes
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.semi_autoregressive import SemiAutoregressiveDraft
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.drafters.shapes import Chain, Shape, StaticTree
from mmspec.drafters.trees.best_first import BestFirstTree
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.models.heads.semi_autoregressive import (
    SemiAutoregressiveHead,
    SemiAutoregressiveHeadConfig,
)
from mmspec.models.heads.state_head import SlotMarks
from mmspec.models.loading import random_model
from mmspec.recipe import Recipe
from mmspec.targets.readers.reader import Reader
from mmspec.training.heads import TargetOutputs, TrainingExample, read_example
from mmspec.training.semi_autoregressive import SPECFLASH
from mmspec.training.trainable import train_head
from mmspec.trees import Tree
from mmspec.verifiers.coupled import Coupled
from tests import toys
from tests.covering import limited
from tests.drafters.heads import RecordedDistribution, Recorder, endless, paths
from tests.drafters.state_heads import ROOM, lesson, target, true_slots
from tests.toys.readers import backbone

BLOCK = 2
SHAPES: dict[str, Shape] = {
    "chain": Chain(Fixed(5)),
    "tree": StaticTree(
        Tree.from_digits("0 1 00 01 10 000 010 0000 0001 0100 00000 00010 01000 010000")
    ),
    "dynamic": DynamicTree(depth=5, beam=2, nodes=12),
}


def new_head(family: str, **parts: Any) -> SemiAutoregressiveHead:
    """A head of random wide weights."""
    reader = backbone(target(family))
    parts = {"num_latents": 2, "block": BLOCK, "intermediate_size": 32, **parts}
    config = SemiAutoregressiveHeadConfig.of(reader.config, reader.vocabulary, **parts)
    made: SemiAutoregressiveHead = random_model(lambda: SemiAutoregressiveHead(config), 0)
    with torch.no_grad():
        made.down.weight.normal_(0.0, 1.0, generator=torch.Generator().manual_seed(0))
    return made


def record(
    family: str, head: SemiAutoregressiveHead, rows: int, shape: str, maker: Any = Recorder
) -> tuple[Any, list[RecordedDistribution]]:
    draft = SemiAutoregressiveDraft(backbone(target(family)), head)
    recorder = maker(draft)
    recipe = Recipe(
        architecture=lambda kit: Autoregressive(recorder, SHAPES[shape]),
        execution=SHAPES[shape],
        verifier=Coupled(),
        name="recorded",
    )
    fast = mmspec.accelerate(target(family), recipe)
    inputs = lesson(family, rows).inputs
    return fast.generate(**inputs, max_new_tokens=ROOM, do_sample=False), recorder.recorded


@torch.no_grad()
def reference(
    reader: Reader, head: SemiAutoregressiveHead, read: TargetOutputs, row: int, new: int, path: Any
) -> Tensor:  # (V,)
    """Logits after `new` tokens of a row and a path: no cache, no tree, no batch."""
    slots, where = true_slots(reader, head, read, row, new)
    for first in range(0, len(path) + 1, BLOCK):
        states = torch.stack([one[1] for one in slots])[None]
        embeds = torch.stack([one[0] for one in slots])[None]
        marks = SlotMarks(raw=torch.tensor([[one[2] for one in slots]]))
        places = torch.tensor([[int(one[4]) for one in slots]])
        ahead = head.predict_block(head(embeds, states, None, places, marks=marks)[0, -1])
        block = path[first : first + BLOCK]
        if len(block) < BLOCK:
            logits: Tensor = reader.head(ahead[len(block)])
            return logits
        for offset, token in enumerate(block):
            own = reader.embed(torch.tensor([token]))[0]
            slots.append((own, ahead[offset], False, slots[-1][3], where + first + offset))
    raise AssertionError


def compare(
    family: str,
    head: SemiAutoregressiveHead,
    example: TrainingExample,
    recorded: list[RecordedDistribution],
) -> Iterator[tuple[Tensor, Tensor]]:
    """Recorded logits, and those of the reference."""
    reader = backbone(target(family))
    read = read_example(reader, example, "hidden")
    prompts = example.inputs["attention_mask"].sum(-1).tolist()
    nodes: list[Any] = []
    for one in recorded:
        nodes = [] if one.nodes is None else [*nodes, one.nodes]
        for row, length in enumerate(one.lengths):
            new = length - prompts[row]
            if new < example.tokens.shape[1]:
                for place, path in paths(nodes, row):
                    found = reference(reader, head, read, row, new, path)
                    yield one.distribution.scores[row, place], found


def is_close(family: str, head: Any, rows: int, recorded: list[RecordedDistribution]) -> None:
    words = slice(toys.WORDS.start, toys.WORDS.stop)
    for own, slow in compare(family, head, lesson(family, rows), recorded):
        margin = 5e-4 * float(slow[words].abs().max())
        assert_close(own[words], slow[words], atol=margin, rtol=0)


@pytest.mark.parametrize(("shape", "rows"), limited([("chain", 1), ("tree", 3), ("dynamic", 2)], 2))
def test_blocks_are_those_of_the_reference(shape: str, rows: int) -> None:
    """Over three blocks of two tokens, from a cache that grows in rounds, on ragged rows."""
    head = new_head("llava")
    out, recorded = record("llava", head, rows, shape)
    assert torch.equal(out.sequences[:, -ROOM:], lesson("llava", rows).tokens)
    depth = max(int(one.nodes.layout.depths.max()) for one in recorded if one.nodes is not None)
    assert depth >= 2 * BLOCK - 1  # a third block
    is_close("llava", head, rows, recorded[:12])


@pytest.mark.exhaustive
def test_roots_of_another_branch_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: every node after the first block takes the states of the first root."""
    head, kind = new_head("llava"), "mmspec.drafters.neural.semi_autoregressive._BlockState"
    monkeypatch.setattr(
        f"{kind}.states_at",
        lambda state, layout, offset: state.ahead[:, :1, offset].expand(
            -1, layout.depths.shape[1], -1
        ),
    )
    _, recorded = record("llava", head, 1, "tree")
    with pytest.raises(AssertionError, match="not close"):
        is_close("llava", head, 1, recorded[:12])


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3"])
@pytest.mark.parametrize("parts", [{"length": 5}, {"tree": [2, 1, 2, 1, 1]}, {}], ids=str)
def test_output_is_the_targets(family: str, parts: dict[str, Any]) -> None:
    """Sampled by coupled noise from the seed of plain decoding, on ragged rows."""
    inputs = toys.inputs(family, batch=2, ragged=True)
    how: dict[str, Any] = {"max_new_tokens": ROOM, "temperature": 1.0, "seed": 3}
    fast = mmspec.accelerate(target(family), "specflash", drafter=new_head(family), **parts)
    plain = mmspec.decode_plain(target(family), **inputs, **how).sequences
    assert torch.equal(fast.generate(**inputs, **how).sequences, plain)


@pytest.mark.exhaustive
def test_training_raises_acceptance_over_two_blocks() -> None:
    """Overfitted to one answer: whole blocks are accepted, the second one after the first."""
    example, reader = lesson("llava", 1), backbone(target("llava"))
    torch.manual_seed(0)
    head = new_head("llava")

    train_head(SPECFLASH, reader, head, endless(example), 150, rate=5e-3)
    fast = mmspec.accelerate(target("llava"), "specflash", drafter=head, length=2 * BLOCK)
    stats = fast.generate(**example.inputs, max_new_tokens=ROOM, do_sample=False).stats
    assert sum(stats.acceptance_histogram[BLOCK + 1 :]) > 0


def test_other_shapes_and_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="block=0 must be"):
        new_head("llava", block=0)
    with pytest.raises(ValueError, match="'compressed' needs at least one"):
        new_head("llava", num_latents=0)
    shape = BestFirstTree(nodes=8, depth=4, step=0.5)
    recipe = replace(recipes.get("specflash"), execution=shape)
    with pytest.raises(ValueError, match="drafts level by level, not a BestFirstTree"):
        mmspec.accelerate(target("llava"), recipe, drafter=new_head("llava"))
