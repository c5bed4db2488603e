"""Multi-token heads: correct distributions and positions, correct output, checked targets."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import mmspec
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.multi_token import MULTI_TOKEN_HEADS, MultiTokenDraft
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.drafters.shapes import Chain, Shape, StaticTree
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.modalities.common.doctor_tokens import examine
from mmspec.models.heads.multi_token import MultiTokenHeads, MultiTokenHeadsConfig
from mmspec.training.heads import TrainingExample, read_pairs
from mmspec.training.multi_token import MULTI_TOKEN, heads_loss
from mmspec.training.trainable import train_head
from mmspec.trees import Tree
from tests import toys
from tests.covering import covering
from tests.drafters.heads import Late, RecordedDistribution, Recorder, endless, greedy_example
from tests.toys import image_models
from tests.toys.readers import backbone

torch.set_num_threads(1)

ROOM, HEADS = 14, 4
SHAPES: dict[str, Shape] = {
    "chain": Chain(Fixed(HEADS)),
    "tree": StaticTree(Tree.from_ranks([[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 0]])),
    "dynamic": DynamicTree(depth=3, beam=2, nodes=5),
}
CASES = [(1, "chain"), (3, "chain"), (1, "tree"), (3, "tree"), (3, "dynamic")]  # rows, shape


@lru_cache(maxsize=8)
def generate_example(family: str, batch: int) -> tuple[TrainingExample, Tensor]:
    given = toys.inputs(family, batch=batch, ragged=batch > 1)
    return greedy_example(toys.model(family, layers=3), given, ROOM)


def zeroed(family: str, **changes: Any) -> MultiTokenHeads:
    reader = backbone(toys.model(family, layers=3))
    config = MultiTokenHeadsConfig.of(reader.config, reader.vocabulary, **changes)
    heads: MultiTokenHeads = MultiTokenHeads(config).train(False)
    return heads


@lru_cache(maxsize=8)
def train_heads(family: str) -> MultiTokenHeads:
    """Heads overfitted to one example: accepted sometimes, at every depth."""
    heads = zeroed(family, num_layers=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lesson = generate_example(family, 3)[0]
        train_head(
            MULTI_TOKEN,
            backbone(toys.model(family, layers=3)),
            heads,
            endless(lesson),
            60,
            rate=2e-2,
        )
    return heads


def random(family: str) -> MultiTokenHeads:
    made: MultiTokenHeads = MULTI_TOKEN_HEADS.random(backbone(toys.model(family, layers=3)), 0)
    return made


def output(family: str, heads: Any, batch: int, **parts: Any) -> Any:
    given = toys.inputs(family, batch=batch, ragged=batch > 1)
    how = {"do_sample": False, **parts.pop("how", {})}
    fast = mmspec.accelerate(toys.model(family, layers=3), "coupled", drafter=heads, **parts)
    out = fast.generate(**given, max_new_tokens=ROOM, **how)
    assert out.stats.fallback is None
    return out


# --- output and distributions
# ------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize(("case", "family"), covering(CASES, ("llava", "llama"), strength=1))
def test_output_is_the_targets_whatever_the_heads_say(case: tuple[int, str], family: str) -> None:
    batch, shape = case
    _, expected = generate_example(family, batch)
    kept = {}
    for name, heads in {
        "zeroed": zeroed(family),
        "random": random(family),
        "learnt": train_heads(family),
    }.items():
        out = output(family, heads, batch, tree=SHAPES[shape])
        assert torch.equal(out.sequences, expected)
        assert out.stats.drafter_saw == "target-states"
        kept[name] = out.stats.num_accepted_draft_tokens
    assert kept["learnt"] > 0


@pytest.mark.parametrize(("batch", "shape"), [(1, "tree"), (3, "chain")])
def test_sampled_output_is_that_of_plain_decoding_with_the_seed(batch: int, shape: str) -> None:
    given = toys.inputs("llava", batch=batch, ragged=batch > 1)
    how = {"do_sample": True, "temperature": 0.5, "top_k": 3, "seed": 3}
    plain = mmspec.accelerate(toys.model("llava", layers=3), "plain")
    expected = plain.generate(**given, max_new_tokens=ROOM, **how).sequences
    out = output("llava", train_heads("llava"), batch, tree=SHAPES[shape], how=how)
    assert torch.equal(out.sequences, expected)
    assert out.stats.num_accepted_draft_tokens > 0


@pytest.mark.parametrize(("batch", "shape"), CASES)
def test_each_distribution_is_that_of_the_last_state_that_the_target_said(
    batch: int, shape: str
) -> None:
    """A node's distribution is that of the head of its depth; delayed states are detected."""
    given = toys.inputs("llava", batch=batch, ragged=batch > 1)
    compare(batch, record_distributions(given, shape, Recorder))
    with pytest.raises(AssertionError):
        compare(batch, record_distributions(given, shape, Late))


def record_distributions(
    given: Any, shape: str, wrap: type[Recorder]
) -> list[RecordedDistribution]:
    """The distributions recorded in a run."""
    model: Any = MultiTokenDraft(backbone(toys.model("llava", layers=3)), train_heads("llava"))
    recorder = wrap(model)
    drafter = Autoregressive(recorder, SHAPES[shape])
    fast = mmspec.accelerate(toys.model("llava", layers=3), "coupled", drafter=drafter)
    fast.generate(**given, max_new_tokens=ROOM, do_sample=False)
    return recorder.recorded


@torch.no_grad()
def compare(batch: int, recorded: list[RecordedDistribution]) -> None:
    """Compare distributions with the heads' on the target's states of the whole output."""
    lesson, reader = generate_example("llava", batch)[0], backbone(toys.model("llava", layers=3))
    room = lesson.tokens.shape[1]
    states = read_pairs(reader, lesson).states[:, -room:]  # the target says token t of state t
    prompts = lesson.inputs["attention_mask"].sum(-1).tolist()
    assert any(one.nodes is not None for one in recorded)
    for one in recorded:
        for row, length in enumerate(one.lengths):
            new = length - prompts[row]
            if new >= room:  # the row has finished
                continue
            logits = reader.head(train_heads("llava")(states[row, new - 1]))
            depths = torch.tensor([0])
            if one.nodes is not None:
                depths = (one.nodes.layout.depths + 1).expand(batch, -1)[row]
            assert_close(one.distribution.scores[row], logits[depths], atol=1e-4, rtol=1e-4)


def test_heads_that_learnt_nothing_say_the_targets_next_token() -> None:
    """With zero weights every head repeats the distribution of the target's token."""
    reader, lesson = backbone(toys.model("llava", layers=3)), generate_example("llava", 3)[0]
    states = read_pairs(reader, lesson).states
    heads = zeroed("llava", num_layers=2)
    assert_close(heads(states), states[:, :, None].expand(-1, -1, HEADS, -1), atol=0, rtol=0)
    assert not torch.equal(train_heads("llava")(states)[:, :, 0], states)


def test_under_guidance_both_branches_are_read() -> None:
    toy = image_models.PAINTERS["janus"]()
    heads = MULTI_TOKEN_HEADS.random(backbone(toy), 0)
    how: Any = {**image_models.request("janus", 3), "guidance": 3.0, "temperature": 1.0, "seed": 0}
    expected = mmspec.accelerate(toy, "plain").generate_images(**how)
    for tree in ("chain", "tree"):
        fast = mmspec.accelerate(toy, "coupled", drafter=heads, tree=SHAPES[tree])
        out = fast.generate_images(**how)
        assert out.stats.fallback is None
        assert torch.equal(out.sequences, expected.sequences)


# --- training -------------------------------------------------------------------------------------


def test_learning_lowers_the_loss_and_leaves_the_target_alone() -> None:
    toy, lesson = toys.model("llava", layers=3), generate_example("llava", 3)[0]
    before = {name: value.clone() for name, value in toy.state_dict().items()}
    heads, losses = zeroed("llava"), list[float]()
    reader, lessons = backbone(toy), endless(lesson)
    train_head(MULTI_TOKEN, reader, heads, lessons, 25, 2e-2, lambda *seen: losses.append(seen[3]))
    assert losses[-1] < 0.8 * losses[0]
    assert not heads.training
    assert all(torch.equal(value, before[name]) for name, value in toy.state_dict().items())
    assert all(weight.grad is None for weight in toy.parameters())


def test_the_loss_asks_each_head_for_its_own_token() -> None:
    """By hand: head h at state t against token t + h; what is behind the end counts nowhere."""
    reader, lesson = backbone(toys.model("llava", layers=3)), generate_example("llava", 3)[0]
    tokens = lesson.tokens.clone()
    tokens[1, 5:] = -1
    states = read_pairs(reader, lesson).states[:, -tokens.shape[1] :]
    distributions = reader.head(train_heads("llava")(states)).log_softmax(-1)
    expected = torch.zeros(())
    for head in range(HEADS):
        found = [
            -distributions[row, at, head, tokens[row, at + head + 1]]
            for row in range(3)
            for at in range(tokens.shape[1] - head - 1)
            if tokens[row, at + head + 1] >= 0
        ]
        expected = expected + 0.5 ** (head + 1) * torch.stack(found).mean()
    loss = heads_loss(reader, train_heads("llava"), TrainingExample(lesson.inputs, tokens), 0.5)
    assert_close(loss, expected, atol=1e-4, rtol=1e-4)


# --- folders and bad input ------------------------------------------------------------------------


def test_a_folder_holds_the_heads_alone(tmp_path: Path) -> None:
    heads, given = train_heads("llava"), {**toys.inputs("llava"), "max_new_tokens": ROOM}
    heads.save_pretrained(tmp_path / "heads")
    here = mmspec.accelerate(toys.model("llava", layers=3), "coupled", drafter=heads, length=HEADS)
    there = mmspec.accelerate(
        toys.model("llava", layers=3), "coupled", drafter=tmp_path / "heads", length=HEADS
    )
    one = here.generate(**given).stats.per_step_accepted
    assert there.generate(**given).stats.per_step_accepted == one
    there.save_pretrained(tmp_path / "saved")
    again = mmspec.load(tmp_path / "saved", toys.model("llava", layers=3))
    assert again.generate(**given).stats.per_step_accepted == one


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "states 32 wide over 160 tokens, .* 64 wide over 160 tokens"),
        ({"vocab_size": 99}, "states 64 wide over 99 tokens"),
    ],
)
def test_the_heads_of_another_target_are_refused(changes: dict[str, Any], message: str) -> None:
    heads = zeroed("llava", **changes)
    with pytest.raises(ValueError, match=message):
        mmspec.accelerate(toys.model("llava", layers=3), "coupled", drafter=heads, length=2)
    with pytest.raises(ValueError, match=message):
        train_head(MULTI_TOKEN, backbone(toys.model("llava", layers=3)), heads, iter(()), 1)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    toy, heads = toys.model("llava", layers=3), zeroed("llava", num_heads=2)
    with pytest.raises(ValueError, match=r"3 tokens deep, .* next 2 only; give length=2"):
        mmspec.accelerate(toy, "coupled", drafter=heads, length=3)
    with pytest.raises(ValueError, match=r"3 tokens deep, .* next 2 only"):
        mmspec.accelerate(toy, "coupled", drafter=heads, tree=SHAPES["dynamic"])
    with pytest.raises(ValueError, match="sees='pixels' does not fit: a set of multi-token heads"):
        mmspec.accelerate(toy, "coupled", drafter=heads, sees="pixels", length=2)
    with pytest.raises(ValueError, match="needs a feature head, and drafter= is a MultiTokenHeads"):
        mmspec.accelerate(toy, "eagle", drafter=heads)
    with pytest.raises(ValueError, match="hides the states of its decoder"):
        mmspec.accelerate(toys.model("whisper", layers=3), "coupled", drafter=heads, length=2)
    heads.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no feature head"):
        mmspec.accelerate(toy, "eagle", drafter=tmp_path)


def test_doctor_knows_heads_by_their_folder(tmp_path: Path) -> None:
    toys.model("llama", layers=3).save_pretrained(tmp_path / "target")
    for name, changes in {"own": {}, "other": {"vocab_size": 99}}.items():
        zeroed("llama", **changes).save_pretrained(tmp_path / name)

    def check_refused(name: str) -> list[str]:
        found = examine(str(tmp_path / "target"), str(tmp_path / name), lambda *_: None, backbone)
        return [one.check for one in found if one.verdict == "refused"]

    assert check_refused("own") == []
    assert check_refused("other") == ["vocabulary"]
