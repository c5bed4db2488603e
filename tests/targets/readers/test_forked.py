"""Trees on recurrent and hybrid models: tokens of `generate()`, states per branch, replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec.draft import Draft, Kind
from mmspec.drafters.oracle import Oracle
from mmspec.modalities.common.families import make_reader
from mmspec.targets.memory import Memory, build_block
from mmspec.targets.readers import check, forked
from mmspec.trees import Tree
from tests import toys
from tests.toys.texts import prompts, text

ROOM, PROMPT = 16, 13
TREE = Tree.branching([2, 2, 1])
CLASSES = ("mamba2", "bamba", "falcon-h1", "nemotron-h", "qwen3-next", "lfm2", "qwen3_5")


def model_of(name: str) -> Any:
    return toys.model(name) if name in ("lfm2", "qwen3_5") else text(name)


def request_of(name: str, batch: int) -> dict[str, Tensor]:
    if name in ("lfm2", "qwen3_5"):
        return toys.inputs(name, batch=batch, ragged=batch > 1)
    return prompts(batch)


def decode(name: str, batch: int, corruption: float = 0.35) -> tuple[Tensor, Tensor, Any]:
    """The tokens of `generate()`, ours, and the statistics."""
    model, request = model_of(name), request_of(name, batch)
    expected = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    answers = expected[:, request["input_ids"].shape[1] :].tolist()
    oracle = Oracle(answers, corruption, tree=TREE)
    fast = mmspec.accelerate(model, "coupled", drafter=oracle)
    out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
    return expected, out.sequences, out.stats


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("mamba2", 2),
        ("falcon-h1", 1),
        *(
            pytest.param(name, batch, marks=pytest.mark.exhaustive)
            for name in CLASSES
            for batch in (1, 3)
        ),
    ],
)
def test_a_tree_gives_the_tokens_of_plain_decoding(name: str, batch: int) -> None:
    expected, ours, stats = decode(name, batch)
    assert torch.equal(ours, expected)
    assert stats.num_new_tokens > stats.target_calls * batch
    assert stats.num_accepted_draft_tokens < stats.num_draft_tokens


def test_nothing_is_read_again_after_a_tree() -> None:
    """A drafter that is always right needs as many calls as on a model with attention."""
    stats = decode("mamba2", 1, corruption=0.0)[2]
    assert stats.target_calls == -(-(ROOM - 1) // (TREE.depth + 1))


def test_states_that_are_shared_by_branches_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: siblings that read each other; the check of the class refuses it."""
    check.clear_cache()
    monkeypatch.setattr(
        forked, "list_paths", lambda corner: [[*range(at + 1)] for at in range(len(corner))]
    )
    with pytest.raises(ValueError, match=r"scores a tree .* otherwise than its own steps"):
        decode("mamba2", 1)
    check.clear_cache()


def test_a_replay_of_another_path_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the state of the committed tokens without the last one."""
    check.clear_cache()
    replay = forked.ForkedRead.replay
    monkeypatch.setattr(forked.ForkedRead, "replay", lambda self, at: replay(self, at - 1))
    with pytest.raises(ValueError, match=r"scores a tree .* otherwise than its own steps"):
        decode("mamba2", 1)
    check.clear_cache()


@torch.no_grad()
def read_tree(name: str) -> tuple[Any, Memory, Any, Draft]:
    reader: Any = make_reader(model_of(name))
    memory, _, _ = reader.prefill(request_of(name, 1), 16)
    draft = Draft.from_tree(Tree((-1, -1, 0, 1)), torch.tensor([[7, 8, 9, 10]]), Kind.DET)
    reader.read(memory, build_block([[5]], draft, memory.like))
    return reader, memory, memory.forked, draft


@torch.no_grad()
def test_the_replayed_state_is_that_of_the_path() -> None:
    reader, memory, _, draft = read_tree("mamba2")
    memory.commit([1], [(1, 3)], draft.nodes)
    own, _, _ = reader.prefill(request_of("mamba2", 1), 16)
    reader.read(own, build_block([[5, 8, 10]], None, own.like))
    for ours, theirs in zip(memory.cache.stateful, own.cache.stateful, strict=True):
        torch.testing.assert_close(ours.conv_states[0], theirs.conv_states[0])
        torch.testing.assert_close(ours.recurrent_states[0], theirs.recurrent_states[0])


@torch.no_grad()
def test_a_replay_computes_no_projection() -> None:
    reader, memory, read, draft = read_tree("mamba2")
    calls: list[Any] = []
    mixer = next(iter(reader.mixers.values()))
    hook = mixer.in_proj.register_forward_pre_hook(lambda *_: calls.append(1))
    shapes: list[Any] = []
    multiply = torch.nn.functional.linear

    def record(x: Any, *others: Any) -> Any:
        shapes.append(x.shape)
        return multiply(x, *others)

    functional: Any = torch.nn.functional
    functional.linear = record
    try:
        memory.commit([1], [(0,)], draft.nodes)
    finally:
        torch.nn.functional.linear = multiply
        hook.remove()
    assert len(calls) == 1  # the module is called, its forward is not
    assert not shapes
    assert read.rows == 2


def test_rows_are_the_leaves() -> None:
    reader, _, read, _ = read_tree("lfm2")
    assert (read.rows, read.width) == (2, 3)
    assert read.spread.tolist() == [0, 1, 3, 0, 2, 4]
    assert not reader.can_branch
    assert reader.reads_trees


def test_a_mask_that_is_no_tree_is_refused() -> None:
    corner = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1]]).bool()
    with pytest.raises(ValueError, match=r"position 2 .*\[1, 2\], which is no path"):
        forked.list_paths(corner)


def test_a_layer_that_stores_keys_and_a_state_is_not_forked() -> None:
    model = text("recurrent-gemma")
    reader: Any = make_reader(model)
    assert not reader.reads_trees
    kind: Any = type(toys.model("llama").model.layers[0].self_attn)
    assert "update" in forked.called_names(kind)
