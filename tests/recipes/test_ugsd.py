"""UGSD: exact at one end of its overrides, the small model alone at the other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import mmspec
from mmspec.drafters.lengths.length import AcceptanceBand
from tests import toys
from tests.covering import limited
from tests.modalities.drawing import sized
from tests.partners import noisy
from tests.toys import image_models

ROOM = 14


def asked(request: dict[str, Tensor], **options: Any) -> Any:
    drafter = noisy("llama", scale=0.1)
    fast = mmspec.accelerate(toys.model("llama"), "ugsd", drafter=drafter, **options)
    return fast.generate(**request, max_new_tokens=ROOM)


@pytest.mark.parametrize("batch", [{}, {"batch": 3, "ragged": True}], ids=["one", "ragged"])
def test_one_rank_without_a_gate_is_greedy_decoding(batch: dict[str, Any]) -> None:
    request = toys.inputs("llama", **batch)
    wanted = toys.model("llama").generate(**request, max_new_tokens=ROOM, do_sample=False)
    out = asked(request, tau_h=-1.0, ranks=1)
    assert torch.equal(out.sequences, wanted)
    assert out.stats.num_accepted_draft_tokens > 0
    assert out.stats.unverified_tokens == 0
    assert not torch.equal(asked(request, tau_h=-1.0, ranks=40).sequences, wanted)


@pytest.mark.parametrize("batch", [{}, {"batch": 3, "ragged": True}], ids=["one", "ragged"])
def test_a_gate_that_keeps_all_is_the_small_model_alone(batch: dict[str, Any]) -> None:
    request = toys.inputs("llama", **batch)
    small = noisy("llama", scale=0.1)
    wanted = small.generate(**request, max_new_tokens=ROOM, do_sample=False)
    out = asked(request, tau_h=float("inf"))
    assert torch.equal(out.sequences, wanted)
    assert out.stats.target_calls == 0
    assert out.stats.unverified_tokens == out.stats.num_new_tokens


def test_what_is_sent_shrinks_with_the_threshold() -> None:
    request = toys.inputs("llama", batch=3)
    sent = []
    for threshold in (0.0, 3.0, 3.4, 3.7, 4.0, 4.2, 4.4, 9.0):
        out = asked(request, tau_h=threshold, length=3)
        sent.append(out.stats.num_new_tokens - out.stats.unverified_tokens)
    assert sent == sorted(sent, reverse=True)
    assert len(set(sent)) >= 3


def test_blocks_follow_what_is_accepted() -> None:
    request = toys.inputs("llama")
    drafted = {scale: asked_with(scale, request).stats.per_step_drafted for scale in (0.0, 3.0)}
    assert drafted[0.0][:-1] == list(range(4, 3 + len(drafted[0.0])))  # the last fills the room
    assert drafted[3.0][:5] == [4, 3, 2, 1, 1]
    with pytest.raises(ValueError, match="start=20"):
        AcceptanceBand(start=20)


def asked_with(scale: float, request: dict[str, Tensor]) -> Any:
    drafter = noisy("llama", scale=scale)
    fast = mmspec.accelerate(toys.model("llama"), "ugsd", drafter=drafter, tau_h=-1.0, ranks=1)
    return fast.generate(**request, max_new_tokens=40)


def test_a_drafter_that_waits_for_the_prompt_cannot_open() -> None:
    with pytest.raises(ValueError, match="the first token is drafted before the prompt is read"):
        mmspec.accelerate(
            toys.model("llava"), "ugsd", drafter=noisy("llava"), sees="target-features"
        )


def test_a_decoder_that_hears_nothing_is_refused() -> None:
    whisper = toys.model("whisper")
    alone = transformers.WhisperForCausalLM(copy.deepcopy(whisper.config))
    with pytest.raises(ValueError, match="a WhisperForCausalLM has no encoder"):
        mmspec.accelerate(whisper, "ugsd", drafter=alone)
    mmspec.accelerate(whisper, "ugsd", drafter=noisy("whisper"))


@pytest.mark.parametrize("family", limited(sorted(image_models.PAINTERS), 3))
def test_pictures_are_drawn_whatever_their_prompts_are_made_of(family: str) -> None:
    """A prompt that is not of the codes' vocabulary is read before the first draft."""
    target, drafter = image_models.PAINTERS[family](), image_models.PAINTERS[family]()
    with torch.no_grad():
        for weight in (one for one in drafter.parameters() if one.dim() > 1):
            weight.mul_(
                1 + 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
            )
    how = {**image_models.request(family, 2), **sized(family), "do_sample": False}
    fast = mmspec.accelerate(target, "ugsd", drafter=drafter, tau_h=-1.0, ranks=1)
    made = fast.generate_images(**how)
    wanted = mmspec.accelerate(target, "plain").generate_images(**how)
    assert torch.equal(made.sequences, wanted.sequences)
    assert made.stats.fallback is None
    alone = mmspec.accelerate(target, "ugsd", drafter=drafter, tau_h=float("inf"))
    assert alone.generate_images(**how).stats.unverified_tokens > 0
