"""A gate over image compression for a head (SpecVLM): its branches, and its training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import mmspec
from mmspec.compressors.elastic_gate import BRANCHES
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.elastic_head import ELASTIC_HEAD, ElasticHead, ElasticHeadConfig
from mmspec.drafters.neural.feature_head import FeatureDraft
from mmspec.drafters.neural.head_prompt import HeadPrompt, head_prompt, question_embeddings
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.drafters.shapes import Chain
from mmspec.models.heads.feature_head import FeatureHead, FeatureHeadConfig
from mmspec.models.loading import load_model as read_head
from mmspec.models.loading import random_model
from mmspec.training.elastic import branch_costs, elastic_loss, gate_logits, sample_branches
from mmspec.training.heads import (
    TargetOutputs,
    TrainingExample,
    read_example,
    required_inputs,
    run_on_prompt,
)
from tests import toys
from tests.drafters.heads import Recorder
from tests.drafters.state_heads import ROOM, lesson, target
from tests.toys.readers import backbone

FAMILY = "llava"


def elastic(**parts: Any) -> ElasticHead:
    """A head of random wide weights."""
    reader = backbone(target(FAMILY))
    config = ElasticHeadConfig.of(reader.config, reader.vocabulary, **parts)
    made: ElasticHead = random_model(lambda: ElasticHead(config), 0)
    return made


def build_prompt(head: Any, example: TrainingExample) -> tuple[HeadPrompt, TargetOutputs]:
    reader = backbone(target(FAMILY))
    outputs = read_example(reader, example, *required_inputs(head, reader))
    return head_prompt(head, reader, outputs.prompt), outputs


@torch.no_grad()
@pytest.mark.parametrize(
    ("parts", "branch", "same_as"),
    [
        ({"keep": 1.0}, "prune", {"visual_slots": "fused"}),  # EagleVLM: all slots are read
        ({"stride": 1}, "pool", {"visual_slots": "fused"}),
        ({"stride": 1}, "conv", {"visual_slots": "fused"}),  # as a convolution begins
        ({}, "drop", {"visual_slots": "hidden"}),  # text alone, at its own positions
    ],
)
def test_branches_that_thin_nothing_or_all_are_known_heads(
    parts: dict[str, Any], branch: str, same_as: dict[str, Any]
) -> None:
    example, reader = lesson(FAMILY, 3), backbone(target(FAMILY))
    head = elastic(branch=branch, **parts)
    if branch == "conv":
        head.gate.conv.pointwise.copy_(torch.eye(64))
        head.gate.conv.depthwise.fill_(1.0)
    config = FeatureHeadConfig.of(reader.config, reader.vocabulary, input_norm=True, **same_as)
    plain = FeatureHead(config)
    plain.load_state_dict(head.head.state_dict())
    said = []
    for one in (head, plain):
        prompt, _ = build_prompt(one, example)
        said.append(run_on_prompt(one, prompt)[:, -ROOM:])
    assert_close(*said, atol=1e-5, rtol=1e-5)
    other = run_on_prompt(head, build_prompt(head.with_branch("resampler"), example)[0])[:, -ROOM:]
    assert not torch.allclose(other, said[1], atol=1e-3)


@torch.no_grad()
def test_the_gate_hears_the_question_and_takes_the_best_branch() -> None:
    """What is behind the picture, of each row; not the answer, which a draft cannot know yet."""
    example, reader, head = lesson(FAMILY, 3), backbone(target(FAMILY)), elastic()
    prompt, outputs = build_prompt(head, example)
    ids, mask = example.inputs["input_ids"], example.inputs["attention_mask"]
    logits = gate_logits(reader, head, outputs)
    for row in range(3):
        text = ids[row, int((ids[row] == toys.IMAGE).nonzero()[-1]) + 1 :]
        assert mask[row].any()
        assert_close(question_embeddings(reader, outputs.prompt, row), reader.embed(text))
        assert_close(logits[row], head.gate.logits(reader.embed(text)))
    for branch in BRANCHES:
        _force_branch(head, branch)
        chosen, forced = (build_prompt(one, example)[0] for one in (head, head.with_branch(branch)))
        assert torch.equal(chosen.embeds, forced.embeds)
    assert prompt.embeds.shape[-1] == 64


@torch.no_grad()
def _force_branch(head: ElasticHead, branch: str) -> None:
    """Make the gate select this branch for every question."""
    head.gate.down.weight.zero_()
    head.gate.down.bias.copy_(9.0 * (torch.arange(5) == BRANCHES.index(branch)))


@torch.no_grad()
@pytest.mark.parametrize("branch", BRANCHES)
def test_drafting_reads_the_prompt_that_training_lays_out(branch: str) -> None:
    """The first distribution of ragged rows is that of a lesson, and the output the target's."""
    example, reader, head = lesson(FAMILY, 3), backbone(target(FAMILY)), elastic(queries=3)
    _force_branch(head, branch)
    recorder = Recorder(FeatureDraft(reader, head))
    drafter = Autoregressive(recorder, Chain(Fixed(3)))
    fast = mmspec.accelerate(target(FAMILY), "coupled", drafter=drafter)
    out = fast.generate(**example.inputs, max_new_tokens=ROOM, do_sample=False)
    assert out.stats.fallback is None
    assert torch.equal(out.sequences[:, -ROOM:], example.tokens)
    expected = reader.head(run_on_prompt(head, build_prompt(head, example)[0])[:, -ROOM])
    words = slice(toys.WORDS.start, toys.WORDS.stop)
    found = recorder.recorded[0].distribution.scores[:, 0, words]
    assert_close(found, expected[:, words], atol=1e-3, rtol=1e-3)


def test_a_temperature_of_0_is_the_argmax() -> None:
    """With the same noise; samples follow the gate's distribution (30 000 draws, 5 sigma)."""
    logits = torch.tensor([[0.3, -1.0, 2.0, 0.0, 0.5]]).expand(30_000, -1)
    drawn = []
    for temperature in (0.0, 1e-4):
        torch.manual_seed(0)
        drawn.append(sample_branches(logits, temperature))
    assert torch.equal(drawn[0].argmax(-1), drawn[1].argmax(-1))
    assert_close(drawn[1].amax(-1).mean(), torch.tensor(1.0), atol=1e-3, rtol=0)
    distribution = logits[0].softmax(-1)
    error = (distribution * (1 - distribution) / 30_000).sqrt()
    assert bool(((drawn[0].mean(0) - distribution).abs() < 5 * error).all())


@pytest.mark.exhaustive
def test_the_gate_learns_the_cheapest_branch_with_the_head() -> None:
    """The head stays as it is here, so what is cheapest is known; a price moves it."""
    example, reader = lesson(FAMILY, 1), backbone(target(FAMILY))
    for price in (0.0, 100.0):
        head = elastic(queries=2)
        _, outputs = build_prompt(head, example)
        with torch.no_grad():
            found = branch_costs(reader, head, outputs, 0.0, 0.1)
            cheapest = int((found.losses + price * found.slots)[:, 0].argmin())
            _force_branch(head, BRANCHES[(cheapest + 1) % 5])
            head.gate.down.bias.mul_(0.1)
        gate = [*head.gate.up.parameters(), *head.gate.down.parameters()]
        optimiser = torch.optim.Adam(gate, lr=0.1)
        torch.manual_seed(0)
        for _ in range(20):
            optimiser.zero_grad()
            loss = elastic_loss(reader, head, example, noise=0.0, slot_weight=price)
            torch.autograd.backward(loss, inputs=gate)
            optimiser.step()
        assert int(gate_logits(reader, head, outputs)[0].argmax()) == cheapest
    assert BRANCHES[cheapest] == "drop"


def test_a_loss_teaches_every_branch_and_the_gate() -> None:
    example, reader, head = lesson(FAMILY, 3), backbone(target(FAMILY)), elastic(queries=2)
    elastic_loss(reader, head, example).backward()
    idle = [name for name, one in head.named_parameters() if one.grad is None]
    assert idle == []
    text = TrainingExample(toys.inputs("llama"), example.tokens[:1])
    gate = {id(one) for one in head.gate.parameters()}
    learnt = [one for one in head.parameters() if id(one) not in gate]
    torch.autograd.backward(elastic_loss(reader, head, text), inputs=learnt)


def test_a_folder_holds_head_and_gate(tmp_path: Path) -> None:
    head = elastic(queries=3, keep=0.4)
    head.save_pretrained(tmp_path)
    again = read_head(ElasticHead, tmp_path, "head")
    assert (again.config.queries, again.config.keep, again.branch) == (3, 0.4, "auto")
    ours, theirs = head.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert ELASTIC_HEAD.owns(tmp_path)
    fast = mmspec.accelerate(target(FAMILY), "specvlm", drafter=tmp_path)
    given = toys.inputs(FAMILY)
    plain = mmspec.decode_plain(target(FAMILY), **given, max_new_tokens=6, do_sample=False)
    out = fast.generate(**given, max_new_tokens=6, do_sample=False)
    assert torch.equal(out.sequences, plain.sequences)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"visual_slots": "fused"}, "this head compresses images with a gate"),
        ({"keep": 0.0}, "keep=0.0 is not a share"),
        ({"branch": "best"}, "branch='best' is not known"),
        ({"visual_keep": 0.5}, "leaves no image slots for visual_keep"),
    ],
)
def test_designs_that_are_none_are_refused(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        elastic(**parts)


def test_a_prompt_of_unknown_tokens_is_drafted_without() -> None:
    """Pictures cannot be told apart there; the output is the target's all the same."""
    own, example = target(FAMILY), lesson(FAMILY, 1)
    embeds: Tensor = own.get_input_embeddings()(example.tokens)
    expected = own.generate(inputs_embeds=embeds, max_new_tokens=5, do_sample=False)
    fast = mmspec.accelerate(own, "specvlm", drafter=elastic())
    out = fast.generate(inputs_embeds=embeds, max_new_tokens=5, do_sample=False)
    assert torch.equal(out.sequences, expected)
    assert out.stats.fallback is not None
