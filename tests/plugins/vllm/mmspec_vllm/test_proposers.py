"""A proposer drafts what mmspec's own lookup drafts for each text, whatever the batch does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mmspec.drafters.lookup.automaton import Automaton
from mmspec.drafters.lookup.datastore import Datastore
from mmspec.drafters.lookup.prompt_lookup import PromptLookup
from mmspec.drafters.lookup.suffix import SuffixAutomaton
from mmspec.drafters.lookup.text_index import NGramIndex, copy_tokens
from mmspec_vllm import (
    PromptLookupProposer,
    RetrievalProposer,
    SuffixAutomatonProposer,
    TokenRecyclingProposer,
)
from tests.covering import limited
from tests.drafters.driving import context
from tests.plugins.vllm.mmspec_vllm.batches import PLACEHOLDER, Batch, config, play

PROPOSERS = (PromptLookupProposer, SuffixAutomatonProposer, TokenRecyclingProposer)


def look_up(text: Sequence[int], length: int) -> list[int]:
    index = NGramIndex(3, frozenset((PLACEHOLDER,)))
    index.read(text)
    return copy_tokens(text, index.find(text), length, (PLACEHOLDER,))


def follow_automaton(text: Sequence[int], length: int) -> list[int]:
    automaton = Automaton((PLACEHOLDER,), 2)
    automaton.read(text)
    return copy_tokens(text, automaton.find(text), length, (PLACEHOLDER,))


@pytest.mark.parametrize("seed", limited(range(4), 2))
@pytest.mark.parametrize(
    ("proposer", "draft"),
    [(PromptLookupProposer, look_up), (SuffixAutomatonProposer, follow_automaton)],
)
def test_drafts_are_those_of_each_text_read_alone(
    proposer: Any, draft: Callable[[Sequence[int], int], list[int]], seed: int
) -> None:
    drafted = 0
    for rows, sampled, drafts in play(proposer(config()), 150, seed):
        expected = [
            draft(row, 4) if tokens else [] for row, tokens in zip(rows, sampled, strict=True)
        ]
        assert drafts == expected
        drafted += sum(map(len, drafts))
    assert drafted > 200


def test_drafts_are_those_of_the_drafters_of_mmspec() -> None:
    texts = [[1, 2, 3, 9, 1, 2], [5, 6, 7, 5, 6, 7], [1, 2, 3, 4], [2, PLACEHOLDER, 2], [4, 4, 4]]
    for proposer, drafter in (
        (PromptLookupProposer, PromptLookup(4, ignore=(PLACEHOLDER,))),
        (SuffixAutomatonProposer, SuffixAutomaton(4, ignore=(PLACEHOLDER,))),
    ):
        now = context(*texts)
        draft = drafter.propose(now, drafter.begin(now))
        expected = [
            tokens[mask].tolist() for tokens, mask in zip(draft.tokens, draft.mask, strict=True)
        ]
        batch = Batch([text[:-1] for text in texts])
        assert batch.step(proposer(config()), [text[-1:] for text in texts]) == expected


def test_recycling_follows_what_was_output_by_any_request() -> None:
    batch = Batch([[1, 2, 3], [9, 8]])
    proposer = TokenRecyclingProposer(config())
    assert batch.step(proposer, [[4], []]) == [[], []]  # 1 2 3 is a prompt; 3 -> 4 was output
    assert batch.step(proposer, [[5, 6], [3]]) == [[], [4, 5, 6]]
    assert batch.step(proposer, [[4], [5]]) == [
        [5, 6, 4, 5],
        [6, 4, 5, 6],
    ]  # 3 -> 5 is new
    assert batch.step(proposer, [[3], []]) == [[5, 6, 4, 3], []]


def test_recycling_has_a_table_per_request_or_reads_prompts_where_asked() -> None:
    batch = Batch([[1, 2, 3], [9, 8]])
    fresh = TokenRecyclingProposer(config(options={"fresh": True}))
    batch.step(fresh, [[4], []])
    assert batch.step(fresh, [[3], [3]]) == [[4, 3, 4, 3], []]
    batch = Batch([[1, 2, 3], [9, PLACEHOLDER, 8]])
    reading = TokenRecyclingProposer(config(options={"prompts": True}))
    assert batch.step(reading, [[1], [9]]) == [[2, 3, 1, 2], []]  # no chain crosses a placeholder


def test_retrieval_drafts_what_the_datastore_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Datastore.of([[1, 2, 3, 4, 5], [8, 2, PLACEHOLDER, 4], [0, 0, 1, 1, 2, 2, 0, 2, 1]])
    store.save(tmp_path / "store.npz")
    options = {"datastore": str(tmp_path / "store.npz")}
    for rows, sampled, drafts in play(RetrievalProposer(config(options=options)), 60, 0):
        assert drafts == [
            store.continuation(row, 4) if tokens else []
            for row, tokens in zip(rows, sampled, strict=True)
        ]
    monkeypatch.setenv("MMSPEC_VLLM_DATASTORE", options["datastore"])
    batch = Batch([[1, 2], [8], [1, PLACEHOLDER]])
    drafts = batch.step(RetrievalProposer(config()), [[3], [2], [2]])
    assert drafts == [[4, 5], [], []]  # a placeholder is neither proposed nor matched


def test_retrieval_without_a_readable_datastore_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"datastore=None must be the path .* in MMSPEC_VLLM_DATA"):
        RetrievalProposer(config())
    with pytest.raises(ValueError, match=r"nowhere.npz is not a datastore"):
        RetrievalProposer(config(options={"datastore": "nowhere.npz"}))
    Datastore.of([[1, 25]]).save(tmp_path / "store.npz")
    options = {"datastore": str(tmp_path / "store.npz")}
    with pytest.raises(ValueError, match="token id 25, but the target's vocabulary has 20"):
        RetrievalProposer(config(options=options))
    with pytest.raises(ValueError, match="longest=253 and a draft of 4 tokens exceed"):
        RetrievalProposer(config(options={**options, "longest": 253}))


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_drafts_end_where_the_text_must(proposer: Any) -> None:
    made = proposer(config(text_length=10))
    batch = Batch([[1, 2, 1, 2, 1, 2]])
    lengths = [len(batch.step(made, [[1]])[0]), len(batch.step(made, [[2]])[0])]
    lengths += [len(batch.step(made, [[1]])[0]), len(batch.step(made, [[2]])[0])]
    assert lengths == ([0, 1, 0, 0] if proposer is TokenRecyclingProposer else [2, 1, 0, 0])


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_ids_beyond_the_vocabulary_are_never_proposed(proposer: Any) -> None:
    made = proposer(config(vocabulary=5))
    batch = Batch([[1, 2, 6, 1, 2, 6, 1]])
    assert batch.step(made, [[2]]) == [[]]


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_unknown_options_and_settings_are_refused(proposer: Any) -> None:
    with pytest.raises(ValueError, match="has depth, which this proposer does not know; it has"):
        proposer(config(options={"depth": 2}))
    with pytest.raises(ValueError, match="must be options; give a mapping"):
        proposer(config(options=3))
    with pytest.raises(ValueError, match=r"num_speculative_tokens=129 must be within 1\.\.128"):
        proposer(config(draft_length=129))
    with pytest.raises(ValueError, match="num_speculative_tokens=None must be within"):
        proposer(config(draft_length=None))
    with pytest.raises(ValueError, match=r"per_batch_size=.* is not passed on"):
        proposer(config(schedule=[(1, 4, 2)]))


@pytest.mark.parametrize(
    ("proposer", "name", "value"),
    [
        (PromptLookupProposer, "longest", 0),
        (PromptLookupProposer, "longest", True),
        (SuffixAutomatonProposer, "shortest", 1.5),
        (TokenRecyclingProposer, "fresh", 1),
        (TokenRecyclingProposer, "prompts", "yes"),
    ],
)
def test_values_of_options_are_checked(proposer: Any, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r} must be .* set it in"):
        proposer(config(options={name: value}))


def test_other_additional_configuration_is_left_alone() -> None:
    made = config()
    made.additional_config = object()
    assert PromptLookupProposer(made).longest == 3
    made.additional_config = {"another": 1, "mmspec": {"longest": 5}}
    assert PromptLookupProposer(made).longest == 5
