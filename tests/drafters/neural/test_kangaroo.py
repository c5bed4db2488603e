"""Kangaroo: the first layers and an adapter draft; the other layers complete the target."""

from __future__ import annotations

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
from mmspec.drafters.neural.kangaroo import KANGAROO_ADAPTER, KangarooDraft
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.drafters.shapes import Chain, Shape, StaticTree
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.models.heads.kangaroo import (
    KangarooAdapter,
    KangarooAdapterConfig,
)
from mmspec.models.loading import random_model
from mmspec.targets.readers.hooks import LayerStatesHook
from mmspec.training.heads import TrainingExample, read_example
from mmspec.training.kangaroo import (
    FASTVLM,
    KANGAROO,
    imitation_loss,
    kangaroo_loss,
)
from mmspec.training.trainable import HeadTraining, train_head
from mmspec.trees import Tree
from tests import toys
from tests.drafters.heads import RecordedDistribution, Recorder, endless, paths
from tests.drafters.state_heads import LAYERS, ROOM, lesson, target
from tests.toys.readers import backbone

EXIT = 3
SHAPES: dict[str, Shape] = {
    "chain": Chain(Fixed(4)),
    "tree": StaticTree(Tree.from_ranks([[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 0]])),
    "dynamic": DynamicTree(depth=3, beam=2, nodes=5),
}


@lru_cache(maxsize=8)
def adapter(family: str, exit_layer: int = EXIT) -> KangarooAdapter:
    reader = backbone(target(family))
    config = KangarooAdapterConfig.of(reader.config, reader.vocabulary, exit_layer=exit_layer)
    made: KangarooAdapter = random_model(lambda: KangarooAdapter(config), 0)
    return made


# --- distributions
# -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "rows", "shape"),
    [
        ("llava", 3, "chain"),
        pytest.param("qwen2_5_vl", 3, "tree", marks=pytest.mark.exhaustive),
        ("gemma3", 1, "dynamic"),
    ],
)
def test_a_distribution_is_that_of_a_reading_from_scratch(
    family: str, rows: int, shape: str
) -> None:
    """And an adapter behind another layer says something else."""
    example, own = lesson(family, rows), adapter(family)
    recorder = Recorder(KangarooDraft(backbone(target(family)), own))  # type: ignore[arg-type]
    drafter = Autoregressive(recorder, SHAPES[shape])
    fast = mmspec.accelerate(target(family), "coupled", drafter=drafter)
    out = fast.generate(**example.inputs, max_new_tokens=ROOM, do_sample=False)
    assert out.stats.fallback is None
    assert torch.equal(out.sequences[:, -ROOM:], example.tokens)
    recorded = recorder.recorded[:7]
    assert any(one.nodes is not None for one in recorded)
    agree(family, own, EXIT, example, recorded)
    with pytest.raises(AssertionError):
        agree(family, own, EXIT + 1, example, recorded)


@torch.no_grad()
def agree(
    family: str,
    own: KangarooAdapter,
    exit_layer: int,
    example: TrainingExample,
    recorded: list[RecordedDistribution],
) -> None:
    """Distributions against one forward of the whole target over a node's own path."""
    reader = backbone(target(family))
    prompts = example.inputs["attention_mask"].sum(-1).tolist()
    words, read_nodes = slice(toys.WORDS.start, toys.WORDS.stop), list[Any]()
    for one in recorded:
        read_nodes = [] if one.nodes is None else [*read_nodes, one.nodes]
        for row, length in enumerate(one.lengths):
            new = length - prompts[row]
            if new >= example.tokens.shape[1]:
                continue
            for place, path in paths(read_nodes, row):
                ids = example.tokens[row : row + 1, :new].tolist()[0] + path
                tokens = torch.tensor([ids]).repeat(len(example.tokens), 1)  # this row is looked at
                read = read_example(
                    reader, TrainingExample(example.inputs, tokens), f"layers:{exit_layer}"
                )
                pad = read.prompt.padding[row]
                states = own(read.prompt.features[row : row + 1, pad:])
                logits = reader.head(states[0, -1])
                ours = one.distribution.scores[row, place]
                assert_close(ours[words], logits[words], atol=1e-3, rtol=1e-3)


# --- early exit -----------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3"])
def test_shallow_and_deep_layers_are_the_whole_target(family: str) -> None:
    """Bit for bit: what the first layers give, read by the others, is a full forward."""
    own = target(family)
    decoder = backbone(own).decoder
    ids = torch.tensor([[7, 9, 30, 41]])
    with LayerStatesHook(backbone(own), [EXIT]) as noted:
        whole = decoder(input_ids=ids).last_hidden_state
    early = noted.offer()
    deep: list[Tensor] = []

    def replace(module: Any, args: Any, out: Any) -> Any:
        deep.append(early)
        return (early, *out[1:]) if isinstance(out, tuple) else early

    hook = list(backbone(own).layers)[EXIT - 1].register_forward_hook(replace)
    other = torch.tensor([[8, 8, 8, 8]])  # whatever the first layers read
    assert torch.equal(decoder(input_ids=other).last_hidden_state, whole)
    hook.remove()
    assert not torch.equal(decoder(input_ids=other).last_hidden_state, whole)
    draft = KangarooDraft(backbone(own), adapter(family))
    with LayerStatesHook(draft.shallow, [EXIT], False) as noted:
        draft.shallow.decoder(input_ids=ids)
    assert torch.equal(noted.offer(), early)


@torch.no_grad()
def test_an_adapter_that_adds_nothing_behind_the_last_real_layer_is_always_right() -> None:
    """Layers behind the exit are bare, and so is the adapter but for the target's norm."""
    own = toys.model("llava", layers=LAYERS)
    for layer in own.model.language_model.layers[EXIT:]:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    reader = backbone(own)
    config = KangarooAdapterConfig.of(reader.config, reader.vocabulary, exit_layer=EXIT)
    made: Any = KangarooAdapter(config).train(False)
    made.layers[0].self_attn.o_proj.weight.zero_()
    made.norm.weight.copy_(own.model.language_model.norm.weight)
    given = toys.inputs("llava", batch=3, ragged=True)
    fast = mmspec.accelerate(own, "kangaroo", drafter=made, length=3)
    out = fast.generate(**given, max_new_tokens=13, do_sample=False)
    assert out.stats.target_calls == 3  # the prompt says 1 token, then every round 4
    assert torch.equal(out.sequences, own.generate(**given, max_new_tokens=13, do_sample=False))


# --- training, folders, bad input -----------------------------------------------------------------


@torch.no_grad()
def test_the_loss_by_hand() -> None:
    example, reader, own = lesson("llava", 3), backbone(target("llava")), adapter("llava")
    tokens = example.tokens.clone()
    tokens[2, 3:] = -1
    read = read_example(reader, TrainingExample(example.inputs, tokens), f"layers:{EXIT}")
    found = []
    for row in range(3):
        pad = read.prompt.padding[row]
        said = reader.head(own(read.prompt.features[row : row + 1, pad:]))[0, -ROOM:]
        for t in range(ROOM):
            if tokens[row, t] >= 0:
                distribution = reader.head(read.next[row, t]).softmax(-1)
                found.append(-(distribution * said[t].log_softmax(-1)).sum())
    loss = kangaroo_loss(reader, own, TrainingExample(example.inputs, tokens))
    assert_close(loss, torch.stack(found).mean(), atol=1e-3, rtol=1e-4)


@torch.no_grad()
def test_imitation_adds_tokens_and_last_states() -> None:
    example, reader, own = lesson("llava", 3), backbone(target("llava")), adapter("llava")
    read = read_example(reader, example, f"layers:{EXIT}")
    expected = kangaroo_loss(reader, own, example)
    hard, near = list[Tensor](), list[Tensor]()
    for row in range(3):
        states = own(read.prompt.features[row : row + 1, read.prompt.padding[row] :])[0, -ROOM:]
        near += list(torch.cosine_similarity(states, read.next[row], -1))
        distributions = reader.head(states).log_softmax(-1)
        hard += [-distributions[t, example.tokens[row, t + 1]] for t in range(ROOM - 1)]
    expected = expected + torch.stack(hard).mean() + 1 - torch.stack(near).mean()
    assert_close(imitation_loss(reader, own, example), expected, atol=1e-3, rtol=1e-4)
    made: Any = FASTVLM.begin(reader, torch.zeros(0))
    assert made.config.exit_layer == LAYERS // 4


@pytest.mark.parametrize("training", [KANGAROO, FASTVLM], ids=["kangaroo", "fastvlm"])
def test_learning_lowers_the_loss(training: HeadTraining) -> None:
    example, reader, seen = lesson("llava", 3), backbone(target("llava")), list[float]()
    made: Any = KANGAROO.begin(reader, torch.zeros(0))
    train_head(training, reader, made, endless(example), 12, 2e-2, lambda *one: seen.append(one[3]))
    assert seen[-1] < 0.95 * seen[0]
    assert not made.training


def test_a_folder_holds_the_published_names(tmp_path: Path) -> None:
    own = adapter("llava")
    own.save_pretrained(tmp_path)
    parts = {f"layers.0.self_attn.{part}_proj.weight" for part in "qkvo"}
    names = {*parts, "layers.0.input_layernorm.weight", "norm.weight"}
    assert set(load_file(tmp_path / "model.safetensors")) == names
    loaded = KANGAROO_ADAPTER.load(tmp_path, backbone(target("llava")))
    assert loaded.config.exit_layer == EXIT
    assert all(torch.equal(one, loaded.state_dict()[n]) for n, one in own.state_dict().items())


@pytest.mark.parametrize("layer", [0, LAYERS, 99])
def test_an_exit_that_is_none_is_refused(layer: int) -> None:
    with pytest.raises(ValueError, match=rf"exit_layer={layer} leaves no layer .* give 1 to 6"):
        mmspec.accelerate(target("llava"), "kangaroo", drafter=adapter("llava", layer))


def test_a_target_with_a_recurrent_state_is_refused() -> None:
    reader = backbone(toys.model("lfm2"))
    config = KangarooAdapterConfig.of(reader.config, reader.vocabulary, exit_layer=1)
    with pytest.raises(ValueError, match="would change its cache"):
        mmspec.accelerate(toys.model("lfm2"), "kangaroo", drafter=KangarooAdapter(config))
