"""Searches of this folder that draft trees or grow drafts token by token: what they draft."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import mmspec
from mmspec.distributions.categorical import Categorical, as_categorical
from mmspec.draft import Draft, Kind
from mmspec.drafters.lookup.backoff import BackoffDrafter, NGramCounts
from mmspec.drafters.lookup.branches import BranchedLookup, LastLogits
from mmspec.drafters.lookup.candidate_memory import CandidateMemory
from mmspec.drafters.lookup.retrieved_tree import merge_branches, pad_trees
from mmspec.drafters.lookup.stored_distributions import StoredDistributions
from mmspec.drafters.lookup.suffix_decoding import SuffixDecoding
from mmspec.drafters.lookup.suffix_tree import SuffixMemory
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.drafters.shapes import StaticTree
from mmspec.trees import Tree
from mmspec.verifiers.recursive import Recursive
from tests import toys
from tests.covering import exhaustive
from tests.drafters.driving import context, count_accepted, drive, greedy, inputs, tiny
from tests.drafters.tables import TableTarget, z_score

NAMES = ("suffix-decoding", "logitspec", "reader", "anpd", "stand")


def test_equal_prefixes_are_merged() -> None:
    tokens, parents = merge_branches([[1, 2, 3], [1, 2, 4, 5], [6]], limit=5, depth=3)
    assert (tokens, parents) == ([1, 2, 3, 4, 6], [-1, 0, 1, 1, -1])
    now = context([0], [5])
    draft = pad_trees(now, [(tokens, parents), ([7], [-1])], depth=3)
    assert draft.tokens.tolist() == [tokens, [7, 5, 5, 5, 5]]
    assert draft.mask.sum(-1).tolist() == [5, 1]
    assert pad_trees(now, [([], []), ([], [])], 3).nodes == 0


def test_counts_back_off_to_shorter_sequences() -> None:
    index = NGramCounts(longest=3, ignore=frozenset({9}))
    text = [1, 2, 3, 1, 2, 4, 1, 2, 4, 5, 2, 3, 9, 6]
    index.read(text[:4])
    index.read(text)
    assert index.find([1, 2]) == 4  # twice, 3 once
    assert index.find([5, 2]) == 3
    assert index.find([8, 2]) == 3  # unknown pair: after 2, 3 and 4 twice each, 3 more recently
    assert index.find([3]) == 1
    assert index.find([8]) is None
    drafted = BackoffDrafter(4, longest=3)
    now = context([1, 2, 3, 1, 2, 3, 1], [5, 6, 7])
    assert drafted.propose(now, drafted.begin(now)).tokens[0].tolist() == [2, 3, 1, 2]


def test_runners_up_are_guesses_with_what_followed_them() -> None:
    drafter = BranchedLookup(LastLogits(), nodes=8, width=2, length=2)
    now = context([4, 5, 6, 7, 8])
    state = drafter.begin(now)
    state.rows[0].last = [5, 9, 4]
    draft = drafter.propose(now, state)
    assert draft.tokens[0].tolist() == [5, 6, 7, 9]
    assert draft.parents[0].tolist() == [-1, 0, 1, -1]


@pytest.mark.parametrize("name", exhaustive(NAMES, [*NAMES][::2]))
def test_the_output_is_the_model_s_own(name: str) -> None:
    model, request = toys.model("llava"), toys.inputs("llava", batch=3, ragged=True)
    fast = mmspec.accelerate(model, name)
    for settings in ({"do_sample": False}, {"temperature": 1.0, "seed": 4}):
        out = fast.generate(**request, max_new_tokens=24, **settings)
        assert out.stats.fallback is None
        assert out.stats.num_draft_tokens > 0
        if name != "stand" or "seed" not in settings:  # its rejections have noise of their own
            plain = mmspec.decode_plain(model, **request, max_new_tokens=24, **settings)
            assert torch.equal(out.sequences, plain.sequences)


def test_outputs_of_earlier_requests_draft_the_next_one(tmp_path: Path) -> None:
    model, prompt = tiny(), inputs((0, 3))
    expected = greedy(model, prompt, 30)
    memory = SuffixMemory()
    cold = count_accepted(drive(model, SuffixDecoding(), prompt, 30)[1])
    drafter = SuffixDecoding(memory=memory)
    assert drive(model, drafter, prompt, 30)[0] == expected
    assert [list(one) for one in memory.outputs] == expected
    found, rounds = drive(model, drafter, prompt, 30)
    assert found == expected
    assert count_accepted(rounds) > cold
    memory.save(tmp_path / "memory.json")
    saved = mmspec.accelerate(model, "suffix-decoding", memory=str(tmp_path / "memory.json"))
    out = saved.generate(**prompt, max_new_tokens=30, do_sample=False)
    assert out.sequences[:, prompt["input_ids"].shape[1] :].tolist() == expected
    assert out.stats.num_accepted_draft_tokens >= count_accepted(rounds)


def test_candidates_stay_between_requests(tmp_path: Path) -> None:
    model, request = toys.model("llama"), toys.inputs("llama")
    memory = CandidateMemory()
    with pytest.raises(ValueError, match="the memory is empty"):
        memory.save(tmp_path / "none.safetensors")
    fast = mmspec.accelerate(model, "token-recycling", memory=memory)
    calls = []
    for _ in range(2):
        calls.append(
            fast.generate(**request, max_new_tokens=24, do_sample=False).stats.target_calls
        )
    assert calls[1] < calls[0]
    memory.save(tmp_path / "memory.safetensors")
    again = mmspec.accelerate(model, "token-recycling", memory=str(tmp_path / "memory.safetensors"))
    found = again.generate(**request, max_new_tokens=24, do_sample=False).stats.target_calls
    assert found <= calls[1]
    memory.clear()
    assert fast.generate(**request, max_new_tokens=24).stats.target_calls == calls[0]
    (tmp_path / "other").write_text("x")
    with pytest.raises(ValueError, match="is not a memory of candidates"):
        CandidateMemory.load(tmp_path / "other")
    with pytest.raises(ValueError, match="the memory is of 4 tokens, but the target has"):
        CandidateMemory(torch.full((5, 8), -1)).table(torch.full((9, 8), -1))


TARGET = TableTarget(size=3, room=5, scale=1.5, forgetful=True)
SIBLINGS = StaticTree(Tree.branching([2, 1]))


@dataclass(frozen=True)
class Sharpened(Autoregressive):
    """The wrong variant: q is not the distribution that the children were drawn from."""

    def propose(self, context: Any, state: Any) -> Draft:
        draft = super().propose(context, state)
        if not isinstance(draft.distribution, Categorical):
            return draft
        drawn = as_categorical(draft.distribution)
        return replace(draft, distribution=Categorical(drawn.scores * 2))


@pytest.mark.exhaustive
def test_stored_distributions_are_exact_and_another_q_is_not() -> None:
    drafter = Autoregressive(StoredDistributions(longest=2, kept=2), SIBLINGS, Kind.WOR)
    assert abs(z_score(TARGET, drafter, Recursive(), rows=3_000)) < 5
    wrong = Sharpened(StoredDistributions(longest=2, kept=2), SIBLINGS, Kind.WOR)
    assert z_score(TARGET, wrong, Recursive(), rows=3_000) > 8


def test_the_longest_stored_ngram_counts() -> None:
    model = StoredDistributions(longest=2, kept=2)
    now = context([3, 1], [4, 1], [7, 7], vocabulary=9)
    state = model.begin(now)
    for row in range(2):
        state.rows[row] = {(1,): ((5,), (0.0,)), (3, 1): ((6, 2), (-0.5, -1.0))}
    q = model.predict_first(now, state).probs[:, 0]
    assert q[0].nonzero().flatten().tolist() == [2, 6]
    assert q[1].argmax() == 5
    assert q[2].argmax() == 7  # unknown: the last token again


def test_what_is_no_memory_or_shape_is_refused() -> None:
    model = toys.model("llama")
    refused: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("suffix-decoding", {"memory": 3}, "memory is an int; give a SuffixMemory"),
        ("token-recycling", {"memory": 3}, "memory is an int; give a CandidateMemory"),
        ("suffix-decoding", {"length": 3}, "retrieval decides the branches of its tree"),
        ("suffix-decoding", {"floor": 2}, "floor=2 must be a number"),
        ("logitspec", {"width": 0}, "width=0 must be a whole number"),
        ("anpd", {"longest": 1}, "longest=1 must be a whole number"),
        ("stand", {"kept": 0}, "kept=0 must be a whole number"),
    )
    for name, options, message in refused:
        with pytest.raises(ValueError, match=message):
            mmspec.accelerate(model, name, **options)
