"""A prompt is read with its first draft: as if it were read before, or it is read before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec.distributions.categorical import as_categorical
from mmspec.distributions.noise import KeyedNoise
from mmspec.distributions.sampling import Sampling
from mmspec.draft import Draft, Kind
from mmspec.targets.memory import build_block
from mmspec.targets.tokens import late
from mmspec.targets.tokens.causal import CausalTarget
from mmspec.targets.tokens.context import Context, Request, append_tokens
from mmspec.targets.tokens.late import JointPrefill
from tests import toys
from tests.toys import granite
from tests.toys.policies import SAMPLED, act, plain, remembering, robot
from tests.toys.readers import backbone

DRAFTS = torch.tensor([[30, 40, 50], [31, 41, 51], [32, 42, 52]])


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    late.clear_cache()
    yield
    late.clear_cache()


@contextmanager
def forwards(model: Any) -> Iterator[list[int]]:
    """How many places each forward of the decoder reads."""
    read: list[int] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        ids: Any = kwargs.get("input_ids")
        read.append((kwargs["inputs_embeds"] if ids is None else ids).shape[1])

    hook = model.get_decoder().register_forward_pre_hook(note, with_kwargs=True)
    yield read
    hook.remove()


def begun(family: str, rows: int) -> tuple[CausalTarget, Context]:
    reader = backbone(toys.model(family))
    inputs = toys.inputs(family, 0, rows, ragged=rows > 1)
    target = CausalTarget(reader, checks=False, defers_prefill=True, joins_prefill=True)
    noise = KeyedNoise.from_seed(0, rows, reader.device)
    return target, target.prefill(Request(inputs, Sampling(), noise, 8))


@torch.no_grad()
def scored(family: str, rows: int) -> Tensor:  # (B, 4, V)
    target, context = begun(family, rows)
    scores = target.score(context, Draft.chain(DRAFTS[:rows], Kind.DET))
    return as_categorical(scores.distribution).scores


def test_a_robot_that_stands_still_costs_one_forward() -> None:
    (wanted,) = plain(1)
    bound = robot("hold-last")
    act(bound, [remembering([wanted])])  # read both ways
    with forwards(bound.model) as read:
        found, rounds = act(bound, [remembering([wanted])])
    assert found == [wanted]
    assert len(read) == len(rounds) == 1
    assert (rounds[0].accepted, rounds[0].calls) == ((6,), 0)


def test_a_robot_that_did_nothing_yet_is_asked_as_ever() -> None:
    wanted, bound = plain(1), robot("hold-last")
    with forwards(bound.model) as read:
        found, rounds = act(bound, [remembering([])])
    assert found == wanted
    assert [len(read), read[1:]] == [7, [1] * 6]
    assert sum(kept.calls for kept in rounds) == 6


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_rows_that_keep_different_numbers(sampling: Any) -> None:
    """Both ways, then at once: behind it every row goes on from its own place."""
    wanted = plain(4, sampling=sampling)
    for _ in range(2):
        done = [[], [wanted[1]], [[wanted[2][0], *wanted[1][1:]]], [wanted[0]]]
        found, rounds = act(robot("hold-last"), [remembering(one) for one in done], 1, sampling)
        assert found == wanted
        assert len(set(rounds[0].accepted)) > 1


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3"])
def test_both_ways_score_alike(family: str, rows: int) -> None:
    """Whichever it is: what is said of the draft is what a prompt read before it leads to."""
    apart, together = scored(family, rows), scored(family, rows)
    torch.testing.assert_close(together, apart, atol=1e-4, rtol=1e-4)


def test_a_prefix_that_sees_itself_is_read_by_itself() -> None:
    """PaliGemma's prompt has no causal mask: a draft within it would be read by the prompt."""
    both = [scored("paligemma", 1) for _ in range(2)]
    torch.testing.assert_close(both[1], both[0])
    target, context = begun("paligemma", 1)
    drafted = JointPrefill.from_request(
        target.backbone, context.request, Draft.chain(DRAFTS[:1], Kind.DET)
    )
    assert drafted is not None
    assert drafted.is_trusted is False
    assert (drafted.read()[1] - both[0]).abs().max() > 1e-2  # what would have been said


def test_a_wrong_reading_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, own = plain(1), JointPrefill.read

    def shifted(self: JointPrefill) -> Any:
        memory, logits = own(self)
        return memory, logits.roll(1, 1)

    monkeypatch.setattr(JointPrefill, "read", shifted)
    for _ in range(2):
        found, rounds = act(robot("hold-last"), [remembering(wanted)])
        assert found == wanted
    assert rounds[0].calls == 1  # the prompt, then its draft
    monkeypatch.setattr(JointPrefill, "is_trusted", True)
    assert act(robot("hold-last"), [remembering(wanted)])[0] != wanted


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_a_drafted_placeholder_is_read_behind_the_prompt(family: str) -> None:
    """Within the prompt it would be counted as one of an image that has no features."""
    target, context = begun(family, 1)
    (image, *_) = target.backbone.placeholder_ids
    drafts = torch.tensor([[5, image, 7]])
    assert (
        JointPrefill.from_request(target.backbone, context.request, Draft.chain(drafts, Kind.DET))
        is None
    )
    found = as_categorical(target.score(context, Draft.chain(drafts, Kind.DET)).distribution).scores
    memory, first, _ = target.backbone.prefill(context.request.inputs, extra_slots=8)
    block = build_block([[5]], Draft.chain(drafts[:, 1:], Kind.DET), memory.like)
    after, _ = target.backbone.read(memory, block)
    expected = torch.cat((first[:, None], after), 1)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_what_cannot_be_read_together_is_not() -> None:
    target, context = begun("llava", 1)
    chain = Draft.chain(DRAFTS[:1], Kind.DET)
    tree = Draft(chain.tokens, torch.tensor([[-1, -1, 0]]), chain.mask, Kind.DET)
    assert JointPrefill.from_request(target.backbone, context.request, chain) is not None
    assert JointPrefill.from_request(target.backbone, context.request, tree) is None
    assert (
        JointPrefill.from_request(target.backbone, context.request, context.empty_draft()) is None
    )
    distribution: Any = target.score(context, tree).distribution
    assert distribution.scores.shape[1] == 4


def test_an_appended_placeholder_is_no_picture() -> None:
    reader = backbone(toys.model("llava"))
    (image, *_), ids = reader.placeholder_ids, torch.tensor([[5, 6]])
    longer = append_tokens(reader, {"input_ids": ids}, torch.tensor([[9, image, 3]]))
    assert longer["input_ids"].tolist() == [[5, 6, 9, 0, 3]]


@pytest.mark.parametrize(
    "name", ["input_features", "input_features_mask", "pixel_values", "images"]
)
def test_sounds_and_pictures_as_long_as_the_prompt_stay(name: str) -> None:
    ids, sound = torch.tensor([[5, 6, 7, 8]]), torch.randn(1, 4, 6)
    if name.endswith("mask"):
        sound = torch.ones(1, 4)
    said = {"input_ids": ids, "attention_mask": torch.ones(1, 4), "token_type_ids": ids * 0}
    longer = append_tokens(
        backbone(toys.model("llama")), {**said, name: sound}, torch.tensor([[9, 3]])
    )
    assert longer["input_ids"].tolist() == [[5, 6, 7, 8, 9, 3]]
    assert {longer[one].shape for one in said} == {(1, 6)}
    assert longer[name] is sound


def test_a_recogniser_s_encoder_runs_once() -> None:
    """Also where a sound has as many frames as its prompt has tokens."""
    request = granite.inputs((1,), seed=0)
    assert request["input_features"].shape[1] == request["input_ids"].shape[1]
    fast = mmspec.accelerate(
        granite.model(), "smud", tokenizer=granite.tokenizer(), weight=0.0, sure=0.0
    )
    wanted = granite.model().generate(**request, max_new_tokens=8, do_sample=False)
    ran: list[int] = []
    layer = granite.model().model.encoder.layers[0]
    hook = layer.register_forward_hook(lambda *told: ran.append(1))
    for count in (3, 1):  # asked how it reads and read both ways, then at once
        ran.clear()
        out = fast.generate(**request, max_new_tokens=8)
        assert torch.equal(out.sequences, wanted)
        assert sum(ran) <= count
    hook.remove()
