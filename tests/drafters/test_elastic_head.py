"""A gate over how pictures are thinned for a head (SpecVLM): its branches, and how it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import mmspec
from mmspec.compressors.elastic_gate import BRANCHES
from mmspec.drafters.growth import Chain
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.elastic_head import ELASTIC_HEAD, ElasticHead, ElasticHeadConfig
from mmspec.drafters.neural.feature_head import FeatureDraft
from mmspec.drafters.neural.head_prompt import HeadPrompt, head_prompt, question_of
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.models.heads.feature_head import FeatureHead, FeatureHeadConfig
from mmspec.models.random_weights import random_model
from mmspec.models.reading import read as read_head
from mmspec.training.elastic import branch_costs, elastic_loss, gate_logits, sampled
from mmspec.training.heads import Lesson, ReadLesson, read_lesson, through_prompt, told_to
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


def laid(head: Any, told: Lesson) -> tuple[HeadPrompt, ReadLesson]:
    reader = backbone(target(FAMILY))
    read = read_lesson(reader, told, *told_to(head, reader))
    return head_prompt(head, reader, read.prompt), read


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
    told, reader = lesson(FAMILY, 3), backbone(target(FAMILY))
    head = elastic(branch=branch, **parts)
    if branch == "conv":
        head.gate.conv.pointwise.copy_(torch.eye(64))
        head.gate.conv.depthwise.fill_(1.0)
    config = FeatureHeadConfig.of(reader.config, reader.vocabulary, input_norm=True, **same_as)
    plain = FeatureHead(config)
    plain.load_state_dict(head.head.state_dict())
    said = []
    for one in (head, plain):
        prompt, _ = laid(one, told)
        said.append(through_prompt(one, prompt)[:, -ROOM:])
    assert_close(*said, atol=1e-5, rtol=1e-5)
    other = through_prompt(head, laid(head.forced("resampler"), told)[0])[:, -ROOM:]
    assert not torch.allclose(other, said[1], atol=1e-3)


@torch.no_grad()
def test_the_gate_hears_the_question_and_takes_the_best_branch() -> None:
    """What is behind the picture, of each row; not the answer, which a draft cannot know yet."""
    told, reader, head = lesson(FAMILY, 3), backbone(target(FAMILY)), elastic()
    prompt, read = laid(head, told)
    ids, mask = told.inputs["input_ids"], told.inputs["attention_mask"]
    logits = gate_logits(reader, head, read)
    for row in range(3):
        text = ids[row, int((ids[row] == toys.IMAGE).nonzero()[-1]) + 1 :]
        assert mask[row].any()
        assert_close(question_of(reader, read.prompt, row), reader.embed(text))
        assert_close(logits[row], head.gate.logits(reader.embed(text)))
    for branch in BRANCHES:
        _lean(head, branch)
        chosen, forced = (laid(one, told)[0] for one in (head, head.forced(branch)))
        assert torch.equal(chosen.embeds, forced.embeds)
    assert prompt.embeds.shape[-1] == 64


@torch.no_grad()
def _lean(head: ElasticHead, branch: str) -> None:
    """Let the gate say so whatever is asked."""
    head.gate.down.weight.zero_()
    head.gate.down.bias.copy_(9.0 * (torch.arange(5) == BRANCHES.index(branch)))


@torch.no_grad()
@pytest.mark.parametrize("branch", BRANCHES)
def test_drafting_reads_the_prompt_that_training_lays_out(branch: str) -> None:
    """The first distribution of ragged rows is that of a lesson, and the output the target's."""
    told, reader, head = lesson(FAMILY, 3), backbone(target(FAMILY)), elastic(queries=3)
    _lean(head, branch)
    recorder = Recorder(FeatureDraft(reader, head))
    drafter = Autoregressive(recorder, Chain(Fixed(3)))
    fast = mmspec.accelerate(target(FAMILY), "coupled", drafter=drafter)
    out = fast.generate(**told.inputs, max_new_tokens=ROOM, do_sample=False)
    assert out.stats.fallback is None
    assert torch.equal(out.sequences[:, -ROOM:], told.tokens)
    expected = reader.head(through_prompt(head, laid(head, told)[0])[:, -ROOM])
    words = slice(toys.WORDS.start, toys.WORDS.stop)
    found = recorder.heard[0].distribution.scores[:, 0, words]
    assert_close(found, expected[:, words], atol=1e-3, rtol=1e-3)


def test_a_temperature_of_0_is_the_argmax() -> None:
    """Of the same noise; and samples follow the gate's distribution (30 000 draws, 5 standard errors)."""
    logits = torch.tensor([[0.3, -1.0, 2.0, 0.0, 0.5]]).expand(30_000, -1)
    drawn = []
    for temperature in (0.0, 1e-4):
        torch.manual_seed(0)
        drawn.append(sampled(logits, temperature))
    assert torch.equal(drawn[0].argmax(-1), drawn[1].argmax(-1))
    assert_close(drawn[1].amax(-1).mean(), torch.tensor(1.0), atol=1e-3, rtol=0)
    distribution = logits[0].softmax(-1)
    error = (distribution * (1 - distribution) / 30_000).sqrt()
    assert bool(((drawn[0].mean(0) - distribution).abs() < 5 * error).all())


@pytest.mark.promise
def test_the_gate_learns_the_cheapest_branch_with_the_head() -> None:
    """The head stays as it is here, so what is cheapest is known; a price moves it."""
    told, reader = lesson(FAMILY, 1), backbone(target(FAMILY))
    for price in (0.0, 100.0):
        head = elastic(queries=2)
        _, read = laid(head, told)
        with torch.no_grad():
            found = branch_costs(reader, head, read, 0.0, 0.1)
            cheapest = int((found.losses + price * found.slots)[:, 0].argmin())
            _lean(head, BRANCHES[(cheapest + 1) % 5])
            head.gate.down.bias.mul_(0.1)
        gate = [*head.gate.up.parameters(), *head.gate.down.parameters()]
        optimiser = torch.optim.Adam(gate, lr=0.1)
        torch.manual_seed(0)
        for _ in range(20):
            optimiser.zero_grad()
            loss = elastic_loss(reader, head, told, noise=0.0, price=price)
            torch.autograd.backward(loss, inputs=gate)
            optimiser.step()
        assert int(gate_logits(reader, head, read)[0].argmax()) == cheapest
    assert BRANCHES[cheapest] == "drop"


def test_a_loss_teaches_every_branch_and_the_gate() -> None:
    told, reader, head = lesson(FAMILY, 3), backbone(target(FAMILY)), elastic(queries=2)
    elastic_loss(reader, head, told).backward()
    idle = [name for name, one in head.named_parameters() if one.grad is None]
    assert idle == []
    text = Lesson(toys.inputs("llama"), told.tokens[:1])
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
        ({"visual_slots": "fused"}, "a gate thins what this head reads"),
        ({"keep": 0.0}, "keep=0.0 is no share"),
        ({"branch": "best"}, "branch='best' is not known"),
        ({"visual_keep": 0.5}, "leaves no slots of a picture for visual_keep"),
    ],
)
def test_designs_that_are_none_are_refused(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        elastic(**parts)


def test_a_prompt_of_unknown_tokens_is_drafted_without() -> None:
    """Pictures cannot be told apart there; the output is the target's all the same."""
    own, told = target(FAMILY), lesson(FAMILY, 1)
    embeds: Tensor = own.get_input_embeddings()(told.tokens)
    expected = own.generate(inputs_embeds=embeds, max_new_tokens=5, do_sample=False)
    fast = mmspec.accelerate(own, "specvlm", drafter=elastic())
    out = fast.generate(inputs_embeds=embeds, max_new_tokens=5, do_sample=False)
    assert torch.equal(out.sequences, expected)
    assert out.stats.fallback is not None
