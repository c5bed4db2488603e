"""AASD: a layer over the target's keys and values, with projected images, and over its own."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import mmspec
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.aasd import AASD_HEAD, AasdDraft
from mmspec.drafters.neural.kv import PooledKv, ProjectedKv, split_images
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.drafters.shapes import Chain, Shape, StaticTree
from mmspec.models.heads.aasd import (
    AasdHead,
    AasdHeadConfig,
    KvProjector,
    load_aasd_head,
    run_means,
)
from mmspec.models.loading import random_model
from mmspec.training.aasd import (
    TargetKv,
    aasd_loss,
    predict_states,
    project_images,
    read_kv,
    train_aasd,
)
from mmspec.training.heads import TrainingExample
from mmspec.trees import Tree
from tests import toys
from tests.drafters.heads import Recorder, endless, paths
from tests.drafters.neural.test_kv import prefill
from tests.drafters.state_heads import LAYERS, ROOM, lesson, target
from tests.toys.readers import backbone

SHAPES: dict[str, Shape] = {
    "chain": Chain(Fixed(4)),
    "tree": StaticTree(Tree.from_ranks([[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 0]])),
}


@lru_cache(maxsize=8)
def head_of(family: str, slots: int = 2, **parts: Any) -> AasdHead:
    """A head of random wide weights, its projection too."""
    reader = backbone(target(family))
    sizes = {"image_slots": slots, "image_size": 9, **parts}
    config = AasdHeadConfig.of(reader.config, reader.vocabulary, **sizes)
    made: AasdHead = random_model(lambda: AasdHead(config), 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in (made.projector.keys, made.projector.values):
            weight.copy_(torch.randn(weight.shape, generator=generator))
    return made


# --- what is drafted ------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "rows", "shape"),
    [
        pytest.param("llava", 3, "chain", marks=pytest.mark.exhaustive),
        ("qwen2_5_vl", 3, "tree"),
        ("gemma3", 1, "chain"),
    ],
)
def test_a_distribution_is_that_of_a_reading_from_scratch(
    family: str, rows: int, shape: str
) -> None:
    """Keys of cached tokens are the target's, of the newest and the drafted ones the head's."""
    example, head, reader = lesson(family, rows), head_of(family), backbone(target(family))
    recorder = Recorder(AasdDraft(reader, head))  # type: ignore[arg-type]
    drafter = Autoregressive(recorder, SHAPES[shape])
    fast = mmspec.accelerate(target(family), "coupled", drafter=drafter)
    out = fast.generate(**example.inputs, max_new_tokens=ROOM, do_sample=False)
    assert out.stats.fallback is None
    assert torch.equal(out.sequences[:, -ROOM:], example.tokens)
    prompts = example.inputs["attention_mask"].sum(-1).tolist()
    words, read_nodes, seen = slice(toys.WORDS.start, toys.WORDS.stop), list[Any](), 0
    for one in recorder.recorded[:7]:
        read_nodes = [] if one.nodes is None else [*read_nodes, one.nodes]
        for row, length in enumerate(one.lengths):
            new = length - prompts[row]
            if new >= example.tokens.shape[1]:
                continue
            for place, path in paths(read_nodes, row):
                ids = example.tokens[row, :new].tolist() + path
                tokens = torch.tensor([ids]).repeat(rows, 1)  # this row is looked at
                read = read_kv(
                    reader, TrainingExample(example.inputs, tokens), head.config.kv_layer
                )
                states = [predict_states(head, read, own)[row, -1] for own in (len(path) + 1, 0)]
                expected, other = (reader.head(state)[words] for state in states)
                ours = one.distribution.scores[row, place][words]
                assert_close(ours, expected, atol=2e-3, rtol=1e-3)
                seen += not torch.allclose(ours, other, atol=1e-2)
    assert seen  # whose keys they are matters


@torch.no_grad()
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_with_the_targets_layer_and_no_split_it_is_the_targets_own_attention(family: str) -> None:
    """m = N and the target's keys for all: its last layer, read as it reads, gives its states."""
    example, own = lesson(family, 3), target(family)
    reader = backbone(own)
    config = AasdHeadConfig.of(
        reader.config, reader.vocabulary, attention_bias=True, image_slots=64, image_size=64
    )
    head = AasdHead(config).train(False)
    layer = reader.layers[LAYERS - 1]
    assert config.kv_layer == LAYERS - 1
    lacking = head.layer.load_state_dict(layer.state_dict(), strict=False)
    for name in lacking.missing_keys:  # a bias that the target has not
        head.layer.get_parameter(name).zero_()
    assert lacking.unexpected_keys == []
    head.norm.load_state_dict(reader.decoder.norm.state_dict())
    entering: list[Tensor] = []
    hook = layer.register_forward_pre_hook(
        lambda _, args, kwargs: entering.append(args[0] if args else kwargs["hidden_states"]),
        with_kwargs=True,
    )
    read = read_kv(reader, example, LAYERS - 1)
    hook.remove()
    read = replace(read, embeds=entering[-1])
    assert_close(predict_states(head, read, 0), read.next, atol=1e-4, rtol=1e-3)
    head.projector = head_of(family).projector
    assert not torch.allclose(predict_states(head, read, 0), read.next, atol=1e-2)


# --- the projection -------------------------------------------------------------------------------


@torch.no_grad()
def test_a_projection_is_along_the_tokens() -> None:
    """As many slots or fewer stay as they are; other sizes stretch the weights."""
    projector, keys = KvProjector(2, 3, 9), torch.randn(2, 9, 4)
    projector.keys.copy_(torch.randn(2, 3, 9))
    ours, means = projector(keys, keys)
    assert_close(ours, torch.einsum("gmn,gnd->gmd", projector.keys, keys))
    assert_close(means, keys.unflatten(1, (3, 3)).mean(2))  # as it begins
    for count in (2, 3):
        assert torch.equal(projector(keys[:, :count], keys[:, :count])[0], keys[:, :count])
    ones = torch.ones(2, 18, 4)
    assert_close(projector(ones, ones)[1], torch.ones(2, 3, 4))
    assert_close(run_means(4, 4), torch.eye(4))


@torch.no_grad()
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_only_the_slots_of_pictures_change(family: str) -> None:
    """In the view of a drafter, and it follows the target's own keys after the prompt."""
    projector = KvProjector(2, 2, 9)
    projector.keys.copy_(torch.randn(2, 2, 9, generator=torch.Generator().manual_seed(0)))
    for kv in (ProjectedKv(projector), PooledKv(2)):
        drafter, context = prefill(family, kv, batch=3, ragged=True)
        view = drafter.begin(context)
        assert view is not None
        for row, ids in enumerate(context.history):
            pad = context.padding[row]
            shown = [at for at, token in enumerate(ids) if token == toys.IMAGE]
            text = [at + pad for at in range(len(ids)) if at not in shown]
            (picture,) = split_images(torch.tensor(shown) + pad)
            places = sorted([*text, *picture[-2:].tolist()])
            first = view.memory.padding[row]
            for layer in (0, 1):
                mine = view.memory.cache.layers[layer].keys[row][:, first : first + len(places)]
                dense = context.memory.cache.layers[layer].keys[row]  # type: ignore[union-attr]
                is_text = torch.tensor([at in text for at in places])
                assert torch.equal(mine[:, is_text], dense[:, text])
                own = dense[:, picture]
                made = projector(own, own)[0] if isinstance(kv, ProjectedKv) else None
                expected = run_means(2, len(picture)) @ own if made is None else made
                assert_close(mine[:, ~is_text], expected)
    _, context = prefill(family, PooledKv(500))
    assert PooledKv(500).open(context, drafter.backbone, [0]) is None


def test_pictures_are_runs_of_slots() -> None:
    assert [one.tolist() for one in split_images(torch.tensor([3, 4, 7, 8, 9]))] == [
        [3, 4],
        [7, 8, 9],
    ]
    assert split_images(torch.tensor([], dtype=torch.int64)) == []


# --- training -------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_head_and_its_projection_learn(tmp_path: Path) -> None:
    example, own = lesson("llava", 3), target("llava")
    reader = backbone(own)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"image_slots": 2, "image_size": 9}
    head = AasdHead(AasdHeadConfig.of(reader.config, reader.vocabulary, **sizes))
    began = head.projector.keys.detach().clone()

    def count_accepted(one: AasdHead) -> float:
        fast = mmspec.accelerate(own, "aasd", drafter=one, length=3)
        out = fast.generate(**example.inputs, max_new_tokens=ROOM, do_sample=False)
        assert out.stats.fallback is None
        assert torch.equal(out.sequences[:, -ROOM:], example.tokens)
        return float(out.stats.mean_acceptance_length)

    before = count_accepted(head)
    train_aasd(reader, head, endless(example), steps=60, rate=5e-3)
    assert count_accepted(head) > before + 0.3
    assert not torch.equal(head.projector.keys, began)
    head.save_pretrained(tmp_path)
    loaded = load_aasd_head(tmp_path)
    assert all(torch.equal(one, loaded.state_dict()[n]) for n, one in head.state_dict().items())
    assert count_accepted(loaded) == count_accepted(head)


@torch.no_grad()
def test_what_is_behind_an_answer_teaches_nothing_and_text_needs_no_picture() -> None:
    example, head, reader = lesson("llava", 1), head_of("llava"), backbone(target("llava"))
    cut = example.tokens.clone()
    cut[:, -3:] = -1
    losses = []
    for tokens in (cut, example.tokens[:, :-3]):
        torch.manual_seed(0)
        losses.append(aasd_loss(reader, head, TrainingExample(example.inputs, tokens)))
    assert_close(*losses, atol=1e-5, rtol=1e-5)
    text = TrainingExample(toys.inputs("llama"), example.tokens)
    read: TargetKv = read_kv(reader, text, head.config.kv_layer)
    assert project_images(read, head.projector)[2].shape == (1, 0)
    assert bool(aasd_loss(reader, head, text).isfinite())


# --- bad input ------------------------------------------------------------------------------------


def test_heads_that_do_not_fit_are_refused() -> None:
    reader = backbone(target("llava"))
    for parts, message in (
        ({"image_slots": 10}, "must be from 1"),
        ({"num_steps": 2}, "has no effect"),
        ({"kv_layer": LAYERS}, f"kv_layer={LAYERS} is not a layer of Llava"),
        ({"hidden_size": 32}, "states 32 wide"),
    ):
        with pytest.raises(ValueError, match=message):
            mmspec.accelerate(target("llava"), "aasd", drafter=head_of("llava", **_sized(parts)))
    turning = head_of("qwen2_5_vl")
    with pytest.raises(ValueError, match=r"positions on three axes \(M-RoPE\), but Llava.* on one"):
        mmspec.accelerate(target("llava"), "aasd", drafter=turning)
    with pytest.raises(ValueError, match=r"positions on one axis, but Qwen.* on three"):
        mmspec.accelerate(target("qwen2_5_vl"), "aasd", drafter=head_of("llava"))
    sliding = toys.model("mistral-sliding")
    short = AASD_HEAD.random(backbone(sliding), 0)
    with pytest.raises(ValueError, match=r"is not a layer of Mistral.* that attends to all tokens"):
        mmspec.accelerate(sliding, "aasd", drafter=short)
    embeds = reader.embed(torch.tensor([[9, 10, 11]]))
    example = TrainingExample({"inputs_embeds": embeds}, torch.tensor([[9, 10]]))
    with pytest.raises(ValueError, match="has no input_ids"):
        aasd_loss(reader, head_of("llava"), example)
    with pytest.raises(ValueError, match="tokens=0 is not a number of means"):
        mmspec.accelerate(target("llava"), "std", kv="pooled:tokens=0")


def _sized(parts: dict[str, Any]) -> dict[str, Any]:
    return {("slots" if name == "image_slots" else name): one for name, one in parts.items()}
