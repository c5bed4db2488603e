"""Heads for several tokens: Medusa's start as the target's, Hydra's depend on the draft."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

import mmspec
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.hydra import HYDRA_HEADS, HydraDraft
from mmspec.drafters.neural.multi_token import MEDUSA_HEADS
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.drafters.shapes import Chain, Shape, StaticTree
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.models.heads.hydra import HydraHeads, HydraHeadsConfig
from mmspec.models.heads.medusa import MedusaHeads, MedusaHeadsConfig
from mmspec.models.loading import random_model
from mmspec.training.heads import TrainingExample, read_example
from mmspec.training.medusa_hydra import (
    HYDRA,
    MEDUSA,
    hydra_loss,
    new_hydra,
    new_medusa,
    output_matrix,
)
from mmspec.training.trainable import train_head
from mmspec.trees import Tree, limit_width
from tests import toys
from tests.drafters.heads import Late, RecordedDistribution, Recorder, endless, paths
from tests.drafters.state_heads import ROOM, lesson, target
from tests.toys.readers import backbone

SHAPES: dict[str, Shape] = {
    "chain": Chain(Fixed(4)),
    "tree": StaticTree(Tree.from_ranks([[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 0]])),
    "dynamic": DynamicTree(depth=3, beam=2, nodes=5),
}
ARCHITECTURES = ("mlp", "prefix-mlp")
COUNTS = torch.zeros(0)


@lru_cache(maxsize=8)
def hydra(family: str, architecture: str) -> HydraHeads:
    reader = backbone(target(family))
    parts = {"hydra_head_arch": architecture, "hydra_num_layers": 2}
    config = HydraHeadsConfig.of(reader.config, reader.vocabulary, **parts)
    made: HydraHeads = random_model(lambda: HydraHeads(config), 0)
    return made


# --- distributions
# -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "rows", "shape", "architecture"),
    [
        ("llava", 3, "chain", "mlp"),
        ("llava", 3, "tree", "prefix-mlp"),
        pytest.param("qwen2_5_vl", 3, "chain", "prefix-mlp", marks=pytest.mark.exhaustive),
        ("gemma3", 1, "dynamic", "prefix-mlp"),
        pytest.param("llava", 3, "dynamic", "mlp", marks=pytest.mark.exhaustive),
    ],
)
def test_a_distribution_is_that_of_a_reading_from_scratch(
    family: str, rows: int, shape: str, architecture: str
) -> None:
    """States delayed by one token are detected."""
    example, heads = lesson(family, rows), hydra(family, architecture)
    for wrap, is_right in ((Recorder, True), (Late, False)):
        recorder = wrap(HydraDraft(backbone(target(family)), heads))  # type: ignore[arg-type]
        drafter = Autoregressive(recorder, SHAPES[shape])
        fast = mmspec.accelerate(target(family), "coupled", drafter=drafter)
        out = fast.generate(**example.inputs, max_new_tokens=ROOM, do_sample=False)
        assert out.stats.fallback is None
        assert torch.equal(out.sequences[:, -ROOM:], example.tokens)
        recorded = recorder.recorded[:9]
        assert any(one.nodes is not None for one in recorded)
        if is_right:
            agree(family, heads, example, recorded)
            continue
        with pytest.raises(AssertionError):
            agree(family, heads, example, recorded)


@torch.no_grad()
def agree(
    family: str, heads: HydraHeads, example: TrainingExample, recorded: list[RecordedDistribution]
) -> None:
    reader = backbone(target(family))
    read = read_example(reader, example, "hidden")
    prompts = example.inputs["attention_mask"].sum(-1).tolist()
    words, read_nodes = slice(toys.WORDS.start, toys.WORDS.stop), list[Any]()
    for one in recorded:
        read_nodes = [] if one.nodes is None else [*read_nodes, one.nodes]
        for row, length in enumerate(one.lengths):
            new = length - prompts[row]
            if new >= example.tokens.shape[1]:
                continue
            pad = read.prompt.padding[row]
            states = read.prompt.features[row : row + 1, pad : pad + length - 1]
            last = heads.prefix(states)[0, -1]
            for place, path in paths(read_nodes, row):
                tokens = torch.tensor([int(example.tokens[row, new - 1]), *path])
                logits = heads(last, reader.embed(tokens[None])[0])
                ours = one.distribution.scores[row, place]
                assert_close(ours[words], logits[words], atol=1e-3, rtol=1e-3)


# --- what untrained heads say ---------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 3])
def test_untrained_heads_say_the_targets_next_token(layers: int) -> None:
    """Medusa's blocks start at zero with the target's output matrix; Hydra's ignore the draft."""
    example, reader = lesson("llava", 3), backbone(target("llava"))
    states = read_example(reader, example, "hidden").next
    words = slice(toys.WORDS.start, toys.WORDS.stop)  # the toy's head has a bias at the others
    expected = reader.head(states)[..., words]
    medusa = new_medusa(reader, COUNTS, medusa_num_layers=layers)
    for head in range(5):
        assert_close(medusa(states)[..., head, words], expected, atol=1e-4, rtol=1e-4)
    heads = new_hydra(reader, COUNTS, hydra_num_layers=layers)
    for head in range(4):
        recorded = torch.randn(*states.shape[:2], head + 1, 64)
        assert_close(heads(states, recorded)[..., words], expected, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        next(medusa.get_submodule("0.0.linear").parameters()).add_(0.1)
    assert not torch.allclose(medusa(states)[..., 0, words], expected, atol=1e-2)


@torch.no_grad()
def test_hydra_without_the_columns_of_embeddings_is_medusa() -> None:
    heads = hydra("llava", "mlp")
    medusa = MedusaHeads(MedusaHeadsConfig(hidden_size=64, vocab_size=160, medusa_num_layers=2))
    independent: Any = HydraHeads(heads.config)
    independent.load_state_dict(heads.state_dict())
    states = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    for head in range(4):
        first, second = independent.hydra_mlp[head][1], independent.hydra_mlp[head][3]
        first.linear.weight[:, 64:] = 0
        first.res_connection.weight.copy_(torch.eye(64, 64 * (head + 2)))
        first.res_connection.bias.zero_()
        independent.hydra_lm_head[head][1].bias.zero_()
        own: Any = medusa.get_submodule(str(head))
        own[0].linear.weight.copy_(first.linear.weight[:, :64])
        own[0].linear.bias.copy_(first.linear.bias)
        own[1].load_state_dict(second.state_dict())
        own[2].weight.copy_(independent.hydra_lm_head[head][1].weight)
        recorded = torch.randn(3, head + 1, 64)
        assert_close(independent(states, recorded), medusa(states)[:, head], atol=1e-5, rtol=1e-5)
        assert not torch.allclose(heads(states, recorded), heads(states, 0 * recorded), atol=1e-2)


def test_the_output_matrix_is_read_off_any_linear_head() -> None:
    reader = backbone(target("llava"))
    direct = output_matrix(reader)
    head = reader.head
    reader.head = lambda states: head(states)
    assert_close(output_matrix(reader), direct, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["medusa", "hydra"])
def test_typical_acceptance_is_lossy_when_sampling_and_exact_when_greedy(name: str) -> None:
    """Every token of a sampled text is typical under the target."""
    own, given = target("llava"), toys.inputs("llava")
    heads = new_medusa(backbone(own), COUNTS) if name == "medusa" else hydra("llava", "mlp")
    fast = mmspec.accelerate(own, "typical", drafter=heads, tree=SHAPES["tree"])
    greedy = fast.generate(**given, max_new_tokens=ROOM, do_sample=False)
    assert torch.equal(greedy.sequences[:, -ROOM:], lesson("llava", 1).tokens)
    out = fast.generate(**given, max_new_tokens=20, temperature=1.0, top_k=0, seed=1)
    assert out.stats.fallback is None
    assert not out.stats.exact
    ids = out.sequences
    with torch.no_grad():
        logits = own(**{**given, "input_ids": ids, "attention_mask": torch.ones_like(ids)}).logits
    distributions = logits[0, given["input_ids"].shape[1] - 1 : -1].double().softmax(-1)
    entropy = -torch.special.xlogy(distributions, distributions).sum(-1)
    least = torch.minimum(torch.tensor(0.09), 0.3 * (-entropy).exp())
    read_nodes = distributions.gather(1, ids[0, -20:, None])[:, 0]
    kept = [place for place, count in _accepted_lengths(out.stats.per_step_accepted) if count]
    assert all(float(read_nodes[place]) > float(least[place]) for place in kept)


def _accepted_lengths(rows: Sequence[int]) -> list[tuple[int, bool]]:
    """Positions of new tokens, and whether each was drafted."""
    found: list[tuple[int, bool]] = [(0, False)]
    for accepted in rows:
        drafted = [True] * accepted + [False]
        found += [(len(found) + at, one) for at, one in enumerate(drafted)]
    return [(place, one) for place, one in found if place < 20]


# --- training -------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("teacher", [0.0, 1.0])
def test_the_loss_of_hydra_by_hand(teacher: float) -> None:
    """Head i at the state before token t: it reads t .. t + i and predicts token t + i + 1."""
    example, reader, heads = lesson("llava", 3), backbone(target("llava")), hydra("llava", "mlp")
    tokens = example.tokens.clone()
    tokens[1, 5:] = -1
    read = read_example(reader, TrainingExample(example.inputs, tokens), "hidden")
    states = read.prompt.features[:, -tokens.shape[1] - 1 : -1]
    expected = torch.zeros(())
    for head in range(4):
        found: list[Tensor] = []
        for row in range(3):
            for t in range(tokens.shape[1] - head - 1):
                if tokens[row, t + head + 1] < 0:
                    continue
                recorded = reader.embed(tokens[row : row + 1, t : t + head + 1])[0]
                distribution = heads(states[row, t], recorded).log_softmax(-1)
                asked = reader.head(read.next[row, t + head]).softmax(-1)
                hard = -distribution[tokens[row, t + head + 1]]
                found.append(-(asked * distribution).sum() if teacher else hard)
        expected = expected + torch.stack(found).mean()
    loss = hydra_loss(reader, heads, TrainingExample(example.inputs, tokens), teacher)
    assert_close(loss, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("name", ["medusa", "hydra", "hydra-pp"])
def test_learning_lowers_the_loss(name: str) -> None:
    example, reader, seen = lesson("llava", 3), backbone(target("llava")), list[float]()
    training: Any = mmspec.recipes.get(name).training
    heads = training.begin(reader, COUNTS)
    train_head(
        training, reader, heads, endless(example), 10, 3e-3, lambda *one: seen.append(one[3])
    )
    assert seen[-1] < 0.9 * seen[0]
    assert not heads.training


# --- folders and bad input ------------------------------------------------------------------------


def test_folders_hold_the_published_names(tmp_path: Path) -> None:
    reader = backbone(target("llava"))
    two: Any = MEDUSA.begin(reader, COUNTS, medusa_num_heads=2)
    two.save_pretrained(tmp_path / "medusa")
    block = {"0.linear.weight", "0.linear.bias", "1.weight"}
    expected = {f"{head}.{name}" for head in range(2) for name in block}
    assert set(load_file(tmp_path / "medusa" / "model.safetensors")) == expected
    assert MEDUSA_HEADS.load(tmp_path / "medusa", backbone(target("llava"))).reach == 2
    heads = hydra("llava", "prefix-mlp")
    heads.save_pretrained(tmp_path / "hydra")
    names = set(load_file(tmp_path / "hydra" / "model.safetensors"))
    assert {"hydra_mlp.0.1.res_connection.weight", "hydra_lm_head.3.1.bias"} < names
    assert "prefix_embeding_layer.layers.0.self_attn.q_proj.weight" in names
    loaded = HYDRA_HEADS.load(tmp_path / "hydra", backbone(target("llava"))).state_dict()
    assert all(torch.equal(one, loaded[name]) for name, one in heads.state_dict().items())
    with pytest.raises(ValueError, match="set of Medusa heads"):
        MEDUSA_HEADS.load(tmp_path / "hydra", backbone(target("llava")))


def test_what_does_not_fit_is_refused() -> None:
    reader = backbone(target("llava"))
    with pytest.raises(ValueError, match="hydra_head_arch='cnn' is not known"):
        HYDRA.begin(reader, COUNTS, hydra_head_arch="cnn")
    few = MEDUSA.begin(reader, COUNTS, medusa_num_heads=2)
    with pytest.raises(ValueError, match="predicts the next 2 only"):
        mmspec.accelerate(target("llava"), "medusa", drafter=few)
    with pytest.raises(ValueError, match=r"a set of Hydra\+\+ heads, and drafter= is a HydraHeads"):
        mmspec.accelerate(target("llava"), "hydra-pp", drafter=hydra("llava", "mlp"))
    other = HydraHeads(HydraHeadsConfig(hidden_size=32, vocab_size=160))
    with pytest.raises(ValueError, match="states 32 wide over 160 tokens"):
        mmspec.accelerate(target("llava"), "hydra", drafter=other)


def test_a_tree_is_no_wider_than_the_vocabulary() -> None:
    """Children without a token left are not drawn; all others are unchanged."""
    tree = Tree.from_ranks([[0], [1], [2], [0, 0], [0, 1], [2, 0], [0, 0, 0], [0, 0, 1]])
    assert limit_width(tree, 3) == tree
    assert limit_width(tree, 2).parents == (-1, -1, 0, 0, 2, 2)
    assert limit_width(tree, 1).parents == (-1, 0, 1)
