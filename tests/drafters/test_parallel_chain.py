"""Chains that are drawn at once: the same drafts as one token after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmspec
from mmspec.draft import Kind
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.p_eagle import PEagleDraft
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.drafters.parallel_chain import ParallelChain
from mmspec.drafters.shapes import Chain
from tests import toys
from tests.drafters.heads import untrained_head
from tests.drafters.parallel_heads import new_head, trained_head
from tests.drafters.state_heads import target
from tests.toys.readers import backbone


@pytest.mark.parametrize("kind", [Kind.IID, Kind.WOR, Kind.RACE])
def test_drafts_are_those_of_a_chain(kind: Kind) -> None:
    """Same noise, same logits: the same tokens, drafted and accepted, in every round."""
    rounds = []
    for shape in (ParallelChain(3), Chain(Fixed(3))):
        model = PEagleDraft(backbone(target("llava")), trained_head("p-eagle", "llava"))
        drafter = Autoregressive(model, shape, kind)
        verifier = "coupled" if kind is Kind.RACE else None
        fast = mmspec.accelerate(target("llava"), "p-eagle", drafter=drafter, verifier=verifier)
        given: Any = toys.inputs("llava", batch=3, ragged=True)
        out = fast.generate(**given, max_new_tokens=10, temperature=0.7, seed=5)
        assert out.stats.num_accepted_draft_tokens > 0
        rounds.append(
            (out.sequences.tolist(), out.stats.num_draft_tokens, out.stats.num_spec_steps)
        )
    assert rounds[0] == rounds[1]


def test_it_takes_the_length_of_its_draft_model() -> None:
    head = new_head("p-eagle", "llava", num_depths=6)
    fast = mmspec.accelerate(target("llava"), "p-eagle", drafter=head)
    given: Any = toys.inputs("llava")
    stats = fast.generate(**given, max_new_tokens=8, do_sample=False).stats
    assert stats.num_draft_tokens > 0
    assert ParallelChain().limit_depth(6) == ParallelChain(6)
    assert ParallelChain(2).limit_depth(6) == ParallelChain(2)
    assert ParallelChain().description == "chain of a whole block"
    assert ParallelChain(6).description == "chain of 6"


def test_models_that_read_their_own_drafts_are_refused() -> None:
    head = untrained_head(target("llava"))
    with pytest.raises(ValueError, match="give length="):
        mmspec.accelerate(target("llava"), "eagle-2", drafter=head, tree=ParallelChain(3))
    with pytest.raises(ValueError, match="length=0"):
        ParallelChain(0)


def test_the_end_of_a_request_shortens_the_draft() -> None:
    fast = mmspec.accelerate(target("llava"), "p-eagle", drafter=trained_head("p-eagle", "llava"))
    given: Any = toys.inputs("llava")
    for room in (1, 2, 3):
        plain = mmspec.decode_plain(target("llava"), **given, max_new_tokens=room, do_sample=False)
        out = fast.generate(**given, max_new_tokens=room, do_sample=False)
        assert torch.equal(out.sequences, plain.sequences)
