"""Multi-token prediction of Speech-LLaMA: verified it is the target, believed it is not."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec.drafters.neural.multi_token import MULTI_TOKEN_HEADS
from mmspec.models.heads.multi_token import MultiTokenHeads, MultiTokenHeadsConfig
from mmspec.training.multi_token import MULTI_TOKEN
from mmspec.training.trainable import train_head
from tests import toys
from tests.drafters.heads import endless, greedy_example
from tests.toys.readers import backbone

ROOM, HEADS = 13, 3


@lru_cache(maxsize=2)
def learnt() -> MultiTokenHeads:
    """Heads that have read one answer again and again."""
    reader = backbone(toys.model("llama"))
    config = MultiTokenHeadsConfig.of(reader.config, reader.vocabulary, num_heads=HEADS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        heads: MultiTokenHeads = MultiTokenHeads(config)
        lesson = greedy_example(toys.model("llama"), toys.inputs("llama"), ROOM)[0]
        train_head(MULTI_TOKEN, reader, heads, endless(lesson), 40, rate=2e-2)
    return heads


def run(recipe: str, heads: Any, batch: int = 1, **options: Any) -> Any:
    fast = mmspec.accelerate(toys.model("llama"), recipe, drafter=heads, length=HEADS, **options)
    given = toys.inputs("llama", batch=batch, ragged=batch > 1)
    return fast.generate(**given, max_new_tokens=ROOM, do_sample=False)


def plain(batch: int = 1) -> Tensor:
    fast = mmspec.accelerate(toys.model("llama"), "plain")
    given = toys.inputs("llama", batch=batch, ragged=batch > 1)
    made: Tensor = fast.generate(**given, max_new_tokens=ROOM, do_sample=False).sequences
    return made


@pytest.mark.parametrize("batch", [1, 3])
def test_what_is_verified_is_the_targets(batch: int) -> None:
    random = MULTI_TOKEN_HEADS.random(backbone(toys.model("llama")), 0)
    for heads in (learnt(), random):
        assert torch.equal(run("speech-llama-mtp", heads, batch).sequences, plain(batch))
    assert run("speech-llama-mtp", learnt()).stats.target_calls < ROOM - 1


def test_a_floor_above_one_is_plain_decoding() -> None:
    out = run("speech-llama-mtp-threshold", learnt(), 3, delta=1.5)
    assert torch.equal(out.sequences, plain(3))
    assert out.stats.num_accepted_draft_tokens == 0


def test_without_a_floor_every_block_is_kept_whole() -> None:
    random = MULTI_TOKEN_HEADS.random(backbone(toys.model("llama")), 0)
    out = run("speech-llama-mtp-threshold", random, delta=0)
    assert not torch.equal(out.sequences, plain())  # nobody has looked at it
    assert out.stats.target_calls == (ROOM - 1) / (HEADS + 1)  # the first token is the prefill's
    assert out.stats.over_accepted_mass > 0


def test_a_lower_floor_keeps_no_less() -> None:
    kept = [
        run("speech-llama-mtp-threshold", learnt(), delta=delta).stats.num_accepted_draft_tokens
        for delta in (0.0, 0.3, 0.6, 0.9, 1.1)
    ]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > kept[-1] == 0


def test_a_floor_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="floor is -1"):
        run("speech-llama-mtp-threshold", learnt(), delta=-1)
