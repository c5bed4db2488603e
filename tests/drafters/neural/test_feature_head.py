"""A feature head: correct distributions and positions, correct output, checked targets."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

import mmspec
from mmspec import recipes
from mmspec.draft import Draft, Gate, Verdict
from mmspec.drafters.draft_model import Layout
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.head_prompt import repeat_last_states
from mmspec.drafters.shapes import Chain, Shape, StaticTree
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.modalities.image import families as image
from mmspec.models.heads.feature_head import FeatureHead, FeatureHeadConfig, load_head
from mmspec.training.heads import EAGLE, TrainingExample
from mmspec.training.trainable import train_head
from mmspec.trees import Tree
from tests import toys
from tests.covering import covering, limited
from tests.drafters.heads import (
    Late,
    RecordedDistribution,
    Recorder,
    drafting,
    endless,
    greedy_example,
    overfit_head,
    slow,
    untrained_head,
)
from tests.partners import noisy
from tests.toys import image_models
from tests.toys.readers import backbone

torch.set_num_threads(1)

ROOM = 14
SHAPES: dict[str, Shape] = {
    "chain": Chain(Fixed(3)),
    "tree": StaticTree(Tree.from_ranks([[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 0]])),
    "dynamic": DynamicTree(depth=3, beam=2, nodes=5),
}
TEXT = ("llama", "llava", "qwen2_5_vl")
CASES = [(1, "chain"), (3, "chain"), (1, "tree"), (3, "dynamic")]  # rows, shape


@lru_cache(maxsize=8)
def model(family: str) -> Any:
    return (
        image_models.PAINTERS[family]()
        if family in image_models.PAINTERS
        else toys.model(family, layers=3)
    )


@lru_cache(maxsize=8)
def generate_example(family: str, batch: int) -> tuple[TrainingExample, Tensor]:
    return greedy_example(model(family), toys.inputs(family, batch=batch, ragged=batch > 1), ROOM)


@lru_cache(maxsize=8)
def generate_image_example(batch: int, scale: float, temperature: float = 0.0) -> TrainingExample:
    """The output of a toy Janus, as a training example of both branches."""
    toy, given = model("janus"), image_models.request("janus", batch)
    plain = mmspec.accelerate(toy, "plain")
    how = {"guidance": scale, "temperature": temperature, "seed": 0}
    tokens = plain.generate_images(**given, **how).sequences
    image_family = image.image_family(toy)
    inputs = image_family.request(given)
    if scale != 1:
        assert image_family.unconditional is not None
        inputs = {**inputs, "guidance_scale": scale, "negative": image_family.unconditional(inputs)}
    return TrainingExample(inputs, tokens)


def sequences(family: str, drafter: Any, batch: int, scale: float = 1.0, **how: Any) -> Any:
    """The output of a run with this drafter, of a text or an image model."""
    verifier = how.pop("verifier", None)
    fast = mmspec.accelerate(model(family), "coupled", drafter=drafter, verifier=verifier)
    if family in image_models.PAINTERS:
        out: Any = fast.generate_images(
            **image_models.request(family, batch), guidance=scale, **how
        )
    else:
        given = toys.inputs(family, batch=batch, ragged=batch > 1)
        out = fast.generate(**given, max_new_tokens=ROOM, **{"do_sample": False, **how})
    assert out.stats.fallback is None
    assert out.stats.drafter_saw == "target-states"
    return out


# --- distributions and output
# ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "family"), limited(covering(CASES, TEXT[::-1], strength=1), 3), ids=str
)
def test_a_head_says_what_it_says_without_memory_and_tree(
    case: tuple[int, str], family: str
) -> None:
    """Greedy output is the target's, and distributions are those of the pairs of their own path."""
    batch, shape = case
    example, expected = generate_example(family, batch)
    head = half_right(family)
    drafter = drafting(model(family), head, SHAPES[shape])
    out = sequences(family, drafter, batch)
    assert torch.equal(out.sequences, expected)
    assert out.stats.num_accepted_draft_tokens > 0
    agree(family, head, example, drafter.model.recorded)


@pytest.mark.parametrize(("case", "scale"), covering(CASES, (3.0, 1.0), strength=1), ids=str)
def test_a_head_is_guided_like_its_target(case: tuple[int, str], scale: float) -> None:
    batch, shape = case
    example, head = generate_image_example(batch, scale), half_right("janus")
    drafter = drafting(model("janus"), head, SHAPES[shape])
    out = sequences("janus", drafter, batch, scale)
    assert torch.equal(out.sequences, example.tokens)
    assert out.stats.num_accepted_draft_tokens > 0
    agree("janus", head, example, drafter.model.recorded)


@pytest.mark.parametrize("family", [name for name in image_models.PAINTERS if name != "janus"])
def test_other_models_that_draw(family: str) -> None:
    toy = model(family)
    more: dict[str, Any] = {"grid": (2, 3)} if family in ("emu3", "chameleon") else {}
    expected = mmspec.accelerate(toy, "plain").generate_images(
        **image_models.request(family, 3), guidance=3.0, **more
    )
    drafter = drafting(toy, untrained_head(toy), SHAPES["tree"])
    out = sequences(family, drafter, 3, 3.0, **more)
    assert torch.equal(out.sequences, expected.sequences)


def test_a_recurrent_target_takes_chains_and_trees() -> None:
    example, expected = generate_example("lfm2", 3)
    head = untrained_head(model("lfm2"))
    drafter = drafting(model("lfm2"), head, SHAPES["chain"])
    assert torch.equal(sequences("lfm2", drafter, 3).sequences, expected)
    agree("lfm2", head, example, drafter.model.recorded)
    drafter = drafting(model("lfm2"), head, SHAPES["tree"])
    assert torch.equal(sequences("lfm2", drafter, 3).sequences, expected)


def test_the_slow_reading_sees_states_that_are_late() -> None:
    """Negative control of the tests above."""
    example, _ = generate_example("llama", 3)
    head = half_right("llama")
    drafter = drafting(model("llama"), head, SHAPES["chain"], Late)
    sequences("llama", drafter, 3)
    with pytest.raises(AssertionError):
        agree("llama", head, example, drafter.model.recorded)


@lru_cache(maxsize=8)
def half_right(family: str) -> FeatureHead:
    """A head trained a little: accepted sometimes, at every depth."""
    example = (
        generate_image_example(3, 3.0) if family == "janus" else generate_example(family, 3)[0]
    )
    return overfit_head(model(family), example, steps=40)


def agree(
    family: str, head: FeatureHead, example: TrainingExample, recorded: list[RecordedDistribution]
) -> None:
    mask = example.inputs["attention_mask"]
    prompts = mask.sum(-1).tolist()
    read_nodes = recorded[:9]
    assert any(one.nodes is not None for one in read_nodes)
    for ours, theirs in slow(model(family), head, example, prompts, read_nodes):
        assert_close(ours.log_softmax(-1), theirs.log_softmax(-1), atol=1e-4, rtol=1e-4)


def test_parents_are_read_off_what_nodes_see() -> None:
    """Nodes 1 and 2 are children of the context, 3 of 2, 4 of 1, 5 of 4."""
    seen = [[[1, 0], [0, 1]]], [[[0, 1, 1, 0], [1, 0, 0, 1]]], [[[1, 0, 0, 1, 1]]]
    layouts = [Layout(torch.zeros(1, 1), torch.tensor(visible).bool()) for visible in seen]
    assert [layout.parents.tolist() for layout in layouts] == [[[0, 0]], [[2, 1]], [[4]]]


# --- sampling -------------------------------------------------------------------------------------


def test_sampled_pictures_are_those_of_plain_decoding() -> None:
    example = generate_image_example(3, 3.0, 1.0)
    for shape in SHAPES.values():
        drafter = drafting(model("janus"), half_right("janus"), shape)
        out = sequences("janus", drafter, 3, 3.0, temperature=1.0, seed=0)
        assert torch.equal(out.sequences, example.tokens)
        assert out.stats.num_accepted_draft_tokens > 0


# --- training -------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["llava", "janus"])
def test_a_head_learns_and_needs_the_right_states(family: str) -> None:
    """Trained beats untrained; states delayed by one token lose most of the gain."""
    example = (
        generate_image_example(3, 3.0) if family == "janus" else generate_example(family, 3)[0]
    )
    scale = 3.0 if family == "janus" else 1.0
    trained_on, raw = overfit_head(model(family), example, 110), untrained_head(model(family))

    def length(head: FeatureHead, wrap: Any = Recorder) -> float:
        drafter = drafting(model(family), head, SHAPES["chain"], wrap)
        out = sequences(family, drafter, 3, scale)
        assert torch.equal(out.sequences[:, -example.tokens.shape[1] :], example.tokens)
        return float(out.stats.mean_acceptance_length)

    best, late = length(trained_on), length(trained_on, Late)
    assert best > length(raw) + 0.8
    assert late < best - 0.5


def test_learning_leaves_the_target_alone_and_the_loss_falls() -> None:
    toy = toys.model("llava", layers=3)
    before = {name: value.clone() for name, value in toy.state_dict().items()}
    example, losses = generate_example("llava", 3)[0], list[float]()
    head = untrained_head(toy)
    reader, lessons = backbone(toy), endless(example)
    train_head(EAGLE, reader, head, lessons, 20, 3e-3, lambda *seen: losses.append(seen[3]))
    assert losses[-1] < 0.8 * losses[0]
    assert not head.training
    assert all(torch.equal(value, before[name]) for name, value in toy.state_dict().items())
    assert all(weight.grad is None for weight in toy.parameters())


def test_nothing_is_learnt_behind_the_end_of_a_row() -> None:
    example = generate_example("llama", 3)[0]
    ended = example.tokens.clone()
    ended[1, 6:] = -1
    other = ended.clone()
    other[1, 6:] = -2  # whatever stands there

    def trained_on(tokens: Tensor) -> Tensor:
        head = untrained_head(model("llama"))
        torch.manual_seed(1)
        lessons = endless(TrainingExample(example.inputs, tokens))
        train_head(EAGLE, backbone(model("llama")), head, lessons, 2, 1e-2)
        return head.fc.weight

    assert torch.equal(trained_on(ended), trained_on(other))
    assert not torch.equal(trained_on(ended), trained_on(example.tokens))


# --- folders and recipes --------------------------------------------------------------------------


def test_a_folder_holds_the_head_and_nothing_of_the_target(tmp_path: Path) -> None:
    toy, head = model("llava"), half_right("llava")
    head.save_pretrained(tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    projections = {f"layers.0.self_attn.{part}_proj.weight" for part in "qkvo"}
    inner = {f"layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    norm = {"layers.0.post_attention_layernorm.weight"}
    assert names == {"fc.weight", "fc.bias", *projections, *inner, *norm}
    given = {**toys.inputs("llava"), "max_new_tokens": ROOM}
    here = mmspec.accelerate(toy, "eagle-2", drafter=head)
    there = mmspec.accelerate(toy, "eagle-2", drafter=tmp_path)
    one, two = here.generate(**given), there.generate(**given)
    assert one.stats.per_step_accepted == two.stats.per_step_accepted
    there.save_pretrained(tmp_path / "saved")
    again = mmspec.load(tmp_path / "saved", toy).generate(**given)
    assert again.stats.per_step_accepted == one.stats.per_step_accepted


def test_a_published_folder_is_read(tmp_path: Path) -> None:
    """In EAGLE's format: a Llama configuration, and the target's embedding table."""
    head = untrained_head(model("llama"))
    weights = {name: value.clone() for name, value in head.state_dict().items()}
    table = model("llama").get_input_embeddings().weight.detach().clone()
    save_file(weights | {"embed_tokens.weight": table}, tmp_path / "model.safetensors")
    config = {**head.config.to_dict(), "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    loaded = load_head(tmp_path)
    assert all(torch.equal(value, weights[name]) for name, value in loaded.state_dict().items())
    del weights["fc.bias"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"no feature head: fc\.bias is missing"):
        load_head(tmp_path)


@pytest.mark.parametrize(
    "name", limited(["lantern", "lantern-pp", "cool-sd", "coupled", "dynamic-tree"], 3)
)
def test_recipes_of_draft_models_take_a_head(name: str) -> None:
    toy, head = model("janus"), half_right("janus")
    fast = mmspec.accelerate(toy, name, drafter=head)
    out = fast.generate_images(**image_models.request("janus", 2), guidance=3.0)
    assert out.stats.fallback is None
    assert out.stats.drafter_saw == "target-states"
    assert out.stats.num_accepted_draft_tokens > 0
    assert (
        torch.equal(out.sequences, generate_image_example(3, 3.0).tokens[:2]) or not out.stats.exact
    )


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "states 32 wide over 160 tokens, .* states 64 wide over 160 tokens"),
        ({"vocab_size": 99}, "states 64 wide over 99 tokens"),
    ],
)
def test_the_head_of_another_target_is_refused(changes: dict[str, Any], message: str) -> None:
    reader = backbone(model("llava"))
    config = FeatureHeadConfig.of(reader.config, reader.vocabulary, head_dim=16, **changes)
    head = FeatureHead(config)
    with pytest.raises(ValueError, match=message):
        mmspec.accelerate(model("llava"), "eagle", drafter=head)
    with pytest.raises(ValueError, match=message):
        train_head(EAGLE, backbone(model("llava")), head, iter(()), 1)


def test_what_does_not_fit_is_refused() -> None:
    toy, head = model("llava"), untrained_head(model("llava"))
    with pytest.raises(ValueError, match="needs a feature head; give drafter="):
        mmspec.accelerate(toy, "eagle")
    with pytest.raises(ValueError, match=r"needs a feature head, and drafter= is a Llava.*"):
        mmspec.accelerate(toy, "eagle-2", drafter=noisy("llava", layers=3))
    with pytest.raises(ValueError, match="needs a draft model, and drafter= is a FeatureHead"):
        mmspec.accelerate(toy, "massv", drafter=head)
    with pytest.raises(ValueError, match="sees='target-states' does not fit"):
        mmspec.accelerate(toy, "coupled", drafter=noisy("llava", layers=3), sees="target-states")
    with pytest.raises(ValueError, match="nothing for compressor="):
        mmspec.accelerate(toy, "eagle", drafter=head, compressor="average-pool")


def test_a_target_without_states_is_refused() -> None:
    whisper = toys.model("whisper", layers=3)
    with pytest.raises(ValueError, match="hides the states of its decoder"):
        mmspec.accelerate(whisper, "eagle", drafter=untrained_head(model("llama")))


class Hurried(Gate):
    """Accepts every third draft without a forward."""

    def __init__(self) -> None:
        self.rounds = 0

    def skip(self, context: Any, draft: Draft) -> Verdict | None:
        self.rounds += 1
        if self.rounds % 3 or draft.nodes < 2:
            return None
        path = torch.zeros(draft.batch, 1, dtype=torch.int64)
        return Verdict(path, torch.ones(draft.batch, dtype=torch.int64), None)


def test_states_that_a_gate_hides_are_borrowed() -> None:
    states = torch.arange(3.0)[:, None]
    assert repeat_last_states(states, 2)[:, 0].tolist() == [1, 2]
    assert repeat_last_states(states, 5)[:, 0].tolist() == [0, 1, 2, 2, 2]
    assert repeat_last_states(states, 0).shape == (0, 1)
    recipe = replace(recipes.get("eagle-2"), execution=SHAPES["chain"], gate=Hurried())
    fast = mmspec.accelerate(model("llama"), recipe, drafter=half_right("llama"))
    out = fast.generate(**toys.inputs("llama"), max_new_tokens=ROOM)
    assert out.stats.fallback is None
    assert out.stats.unverified_tokens > 0
    assert out.stats.num_new_tokens == ROOM
