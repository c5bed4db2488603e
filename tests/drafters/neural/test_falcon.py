"""A Falcon head: its blocks are those of a slow reference, and its training glances by errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import mmspec
from mmspec import recipes
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural import falcon
from mmspec.drafters.neural.falcon import FalconDraft
from mmspec.drafters.neural.feature_head import tap_of
from mmspec.drafters.neural.head_prompt import head_prompt
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.drafters.shapes import Chain, Shape, StaticTree
from mmspec.drafters.trees.best_first import BestFirstTree
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.models.heads.falcon import FalconHead, FalconHeadConfig
from mmspec.models.loading import random_model
from mmspec.recipe import Recipe
from mmspec.targets.readers.reader import Reader
from mmspec.training.falcon import FALCON, falcon_loss, mix_inputs, run_blocks
from mmspec.training.heads import TargetOutputs, read_example
from mmspec.trees import Tree
from mmspec.verifiers.coupled import Coupled
from tests import toys
from tests.drafters.heads import Late, RecordedDistribution, Recorder, paths
from tests.drafters.state_heads import ROOM, lesson, target, true_slots
from tests.toys.readers import backbone

pytestmark = pytest.mark.exhaustive
BLOCK = 2
SHAPES: dict[str, Shape] = {
    "chain": Chain(Fixed(5)),
    "tree": StaticTree(
        Tree.from_digits("0 1 00 01 10 000 010 0000 0001 0100 00000 00010 01000 010000")
    ),
    "dynamic": DynamicTree(depth=5, beam=2, nodes=12),
}


def new_head(family: str, **parts: Any) -> FalconHead:
    """A head of random wide weights."""
    reader = backbone(target(family))
    parts = {"block": BLOCK, "initializer_range": 0.2, **parts}
    config = FalconHeadConfig.of(reader.config, reader.vocabulary, **parts)
    made: FalconHead = random_model(lambda: FalconHead(config), 0)
    return made


def record(
    family: str, head: FalconHead, rows: int, shape: str, maker: Any = Recorder
) -> list[RecordedDistribution]:
    recorder = maker(FalconDraft(backbone(target(family)), head))
    recipe = Recipe(
        architecture=lambda kit: Autoregressive(recorder, SHAPES[shape]),
        execution=SHAPES[shape],
        verifier=Coupled(),
        name="recorded",
    )
    fast = mmspec.accelerate(target(family), recipe)
    out = fast.generate(**lesson(family, rows).inputs, max_new_tokens=ROOM, do_sample=False)
    assert torch.equal(out.sequences[:, -ROOM:], lesson(family, rows).tokens)
    recorded: list[RecordedDistribution] = recorder.recorded[:14]
    return recorded


@torch.no_grad()
def reference(
    reader: Reader, head: FalconHead, read: TargetOutputs, row: int, new: int, path: Any
) -> Tensor:  # (V,)
    """Logits after `new` tokens of a row and a path: no cache, no tree, no batch, no re-reading."""
    slots, where = true_slots(reader, head, read, row, new)
    size = head.config.block
    for first in range(0, len(path) + 1, size):
        embeds = torch.stack([one[0] for one in slots])[None]
        states = torch.stack([one[1] for one in slots])[None]
        places = torch.stack([torch.as_tensor(one[4]) for one in slots], -1)[..., None, :]
        inputs, _ = head.recur(head.fuse_inputs(embeds, states))
        mask = torch.full((len(slots), len(slots)), torch.finfo(torch.float32).min).triu(1)
        mask[-size:] = 0
        ahead = head.attend(inputs, mask[None, None], places)[0, -size:]
        block = path[first : first + size]
        if len(block) < size:
            logits: Tensor = reader.head(ahead[len(block)])
            return logits
        for offset, token in enumerate(block):
            own = reader.embed(torch.tensor([token]))[0]
            slots.append((own, ahead[offset], False, slots[-1][3], where + first + offset))
    raise AssertionError


def compare(family: str, head: FalconHead, rows: int, recorded: list[RecordedDistribution]) -> None:
    example, reader = lesson(family, rows), backbone(target(family))
    read = read_example(reader, example, tap_of(head, reader))
    prompts = example.inputs["attention_mask"].sum(-1).tolist()
    nodes, words = list[Any](), slice(toys.WORDS.start, toys.WORDS.stop)
    for one in recorded:
        nodes = [] if one.nodes is None else [*nodes, one.nodes]
        for row, length in enumerate(one.lengths):
            new = length - prompts[row]
            if new >= example.tokens.shape[1]:
                continue
            for place, path in paths(nodes, row):
                wanted = reference(reader, head, read, row, new, path)[words]
                own = one.distribution.scores[row, place][words]
                margin = 5e-4 * float(wanted.abs().max())
                assert_close(own, wanted, atol=margin, rtol=0)


@pytest.mark.parametrize(
    ("family", "shape", "rows", "parts"),
    [
        ("llava", "chain", 1, {}),
        ("llava", "tree", 3, {"lstm_layers": 2}),
        ("qwen2_5_vl", "dynamic", 2, {"positions": "mrope"}),
        ("llava", "chain", 3, {"block": 4, "visual_slots": "hidden"}),
    ],
)
def test_blocks_are_those_of_the_reference(
    family: str, shape: str, rows: int, parts: dict[str, Any]
) -> None:
    """Over three blocks, from a cache that grows in rounds, on ragged rows; late states differ."""
    head = new_head(family, **parts)
    compare(family, head, rows, record(family, head, rows, shape))
    with pytest.raises(AssertionError, match="not close"):
        compare(family, head, rows, record(family, head, rows, shape, Late))


@pytest.mark.parametrize("name", ["_path_layout", "_path_indices"])
def test_paths_that_share_slots_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: causal attention within a path, and the path of another node."""
    original: Any = vars(falcon)[name]

    def causal(seen: Tensor, depth: int, size: int) -> Any:
        layout = original(seen, depth, size)
        steps = layout.depths.flatten()
        own = layout.visible.clone()
        own[..., -len(steps) :] &= steps <= steps[:, None]
        return replace(layout, visible=own)

    wrong = causal if name == "_path_layout" else lambda *given: original(*given).roll(1, -2)
    monkeypatch.setattr(falcon, name, wrong)
    head = new_head("llava")
    with pytest.raises(AssertionError, match="not close"):
        compare("llava", head, 1, record("llava", head, 1, "tree"))


@torch.no_grad()
def test_padding_changes_nothing_of_the_lstm() -> None:
    head = new_head("llava", lstm_layers=2)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, 6, 64, generator=generator)
    carry = (torch.randn(2, 3, 64, generator=generator), torch.randn(2, 3, 64, generator=generator))
    out, after = head.recur(inputs, carry, [0, 2, 5])
    for row, pad in enumerate([0, 2, 5]):
        one = slice(row, row + 1)
        alone = (carry[0][:, one].contiguous(), carry[1][:, one].contiguous())
        expected, last = head.recur(inputs[one, pad:], alone)
        assert_close(out[one, pad:], expected)
        assert_close(after[0][:, one], last[0])
        assert_close(after[1][:, one], last[1])


# --- training -------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("offset", [0, 1])
def test_training_reads_what_drafting_reads(offset: int) -> None:
    """The last slot of a block is that of a draft that begins there."""
    reader, head, example = backbone(target("llava")), new_head("llava"), lesson("llava", 3)
    read = read_example(reader, example, tap_of(head, reader))
    prompt = head_prompt(head, reader, read.prompt)
    states, length = run_blocks(head, prompt, offset), read.next.shape[1]
    for row in range(3):
        for new in range(1, length + 1):
            slot = prompt.embeds.shape[1] - length + new - 1
            if (slot + offset) % BLOCK == BLOCK - 1:
                for late in range(BLOCK):
                    path = list(range(4, 4 + late))
                    wanted = reference(reader, head, read, row, new, path)
                    own = reader.head(states[row, slot - BLOCK + 1 + late])
                    assert_close(own, wanted, atol=2e-3, rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("glance", [0.0, 0.5, 1.0])
def test_as_many_slots_are_glanced_as_tokens_are_wrong(glance: float) -> None:
    """Others read the token and the state that were predicted K slots before."""
    reader, head, example = backbone(target("llava")), new_head("llava"), lesson("llava", 3)
    read = read_example(reader, example, tap_of(head, reader))
    prompt = head_prompt(head, reader, read.prompt)
    predicted, length = run_blocks(head, prompt, 0), read.next.shape[1]
    right = read.next[:, BLOCK - 1]
    predicted[:, -length] = 1.01 * right  # one right prediction per row
    mixed = mix_inputs(reader, head, read, prompt, predicted, glance)
    assert torch.equal(mixed.states[:, : -length + BLOCK], prompt.states[:, : -length + BLOCK])
    own = predicted[:, -length:-BLOCK]
    is_own = (mixed.states[:, -length + BLOCK :] == own).all(-1)
    is_true = (mixed.states[:, -length + BLOCK :] == prompt.states[:, -length + BLOCK :]).all(-1)
    assert bool((is_own ^ is_true).all())
    wrong = (
        reader.head(own).argmax(-1) != reader.head(read.next[:, BLOCK - 1 : -1]).argmax(-1)
    ).sum(-1)
    assert bool((wrong < own.shape[1]).all())
    assert torch.equal(is_true.sum(-1), (glance * wrong).round().long())
    embeds = reader.embed(reader.head(own).argmax(-1))
    assert torch.equal(mixed.embeds[:, -length + BLOCK :][is_own], embeds[is_own])


def test_every_part_is_trained() -> None:
    reader, head = backbone(target("llava")), new_head("llava", lstm_layers=2)
    torch.autograd.backward(falcon_loss(reader, head.train(), lesson("llava", 3)))
    for name, weight in head.named_parameters():
        assert weight.grad is not None, name
        assert bool(weight.grad.any()), name


# --- bad input ------------------------------------------------------------------------------------


def test_other_shapes_and_settings_are_refused() -> None:
    for parts, words in (
        ({"block": 0}, "block=0 must be"),
        ({"lstm_layers": 0}, "lstm_layers=0 must be"),
        ({"num_hidden_layers": 2}, "give 1, and more lstm_layers"),
        ({"visual_slots": "compressed"}, "choose one of fused, placeholder, hidden"),
        ({"sliding_window": 4}, "no effect"),
    ):
        with pytest.raises(ValueError, match=words):
            new_head("llava", **parts)
    shape = BestFirstTree(nodes=8, depth=4, step=0.5)
    recipe = replace(recipes.get("falcon"), execution=shape)
    with pytest.raises(ValueError, match="drafts level by level, not a BestFirstTree"):
        mmspec.accelerate(target("llava"), recipe, drafter=new_head("llava"))
    head = new_head("llava", tapped_layers=None)
    FALCON.check(head, backbone(target("llava")))
