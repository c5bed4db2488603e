"""A model's own next tokens after single tokens: the table, its file, and its branches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mmspec
from mmspec.drafters.lookup.bigram_table import BigramTable, StoredContinuations, TableGuesses
from mmspec.drafters.lookup.branches import BranchedLookup
from mmspec.drafters.lookup.datastore import Datastore
from tests import toys
from tests.covering import exhaustive
from tests.drafters.driving import context

TABLE = BigramTable(torch.tensor([[1, 2], [3, 0], [3, 1], [4, 2], [0, 1]], dtype=torch.int32))
ROOM = 12


def test_a_row_is_the_best_after_the_token_alone() -> None:
    model = toys.model("llava")
    table = BigramTable.of(model, width=3, batch=7)
    assert len(table.tokens) == model.get_input_embeddings().num_embeddings
    for token in (5, 6, 7, 30):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[token]])).logits[0, -1]
        assert table.following(token) == logits.topk(3).indices.tolist()
    assert table.following(len(table.tokens)) == []


def test_branches_come_from_stores_in_the_order_of_trust() -> None:
    stores = StoredContinuations(Datastore.of([[2, 1, 1, 4]]), TABLE)
    drafter = BranchedLookup(TableGuesses(TABLE), 16, width=2, length=2, longest=2, stores=stores)
    now = context([0, 3, 2], [3, 4, 0, 3])
    draft = drafter.propose(now, drafter.begin(now))
    first, second = (_paths(draft, row) for row in range(2))
    assert first == {
        (3, 4),  # neither text nor datastore: the table, twice
        (3, 2, 2),  # the text after 3, which repeats itself
        (1, 1, 4),  # the datastore after "2 1"
    }
    assert second == {(4, 0, 3), (2, 3, 4)}  # after "3 4", also where 4 is the guess


def _paths(draft: Any, row: int) -> set[tuple[int, ...]]:
    parents, tokens = draft.parents[row].tolist(), draft.tokens[row].tolist()
    real = [node for node in range(len(tokens)) if draft.mask[row, node]]
    leaves = [node for node in real if node not in [parents[one] for one in real]]
    found = set()
    for node in leaves:
        path: list[int] = []
        while node >= 0:
            path.insert(0, tokens[node])
            node = parents[node]
        found.add(tuple(path))
    return found


@pytest.mark.parametrize("family", exhaustive(["llava", "qwen2_5_vl"], ["llava"]))
def test_the_output_is_the_model_s_own_with_any_table(family: str) -> None:
    model, request = toys.model(family), toys.inputs(family, batch=2, ragged=True)
    own = BigramTable.of(model)
    other = BigramTable(own.tokens.flip(0))
    drafted = []
    for table in (own, other, None):
        fast = mmspec.accelerate(model, "ngrammys", table=table)
        for settings in ({"do_sample": False}, {"temperature": 1.0, "seed": 4}):
            out = fast.generate(**request, max_new_tokens=ROOM, **settings)
            plain = mmspec.decode_plain(model, **request, max_new_tokens=ROOM, **settings)
            assert out.stats.fallback is None
            assert torch.equal(out.sequences, plain.sequences)
            drafted.append(out.stats.num_draft_tokens)
    assert min(drafted[:4]) > max(drafted[4:])


def test_a_file_is_what_was_saved(tmp_path: Path) -> None:
    TABLE.save(tmp_path / "table.safetensors")
    assert torch.equal(BigramTable.load(tmp_path / "table.safetensors").tokens, TABLE.tokens)
    (tmp_path / "other.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"other.safetensors is not a table of next tokens"):
        BigramTable.load(tmp_path / "other.safetensors")


def test_what_has_no_table_is_refused() -> None:
    table = BigramTable(torch.tensor([[999]], dtype=torch.int32))
    with pytest.raises(ValueError, match="table has token id 999, but the target"):
        mmspec.accelerate(toys.model("llama"), "ngrammys", table=table)
    with pytest.raises(ValueError, match="length_of_branch=0 must be"):
        mmspec.accelerate(toys.model("llama"), "ngrammys", length_of_branch=0)
    with pytest.raises(ValueError, match="width=10000 is more than"):
        BigramTable.of(toys.model("llama"), width=10_000)
    with pytest.raises(ValueError, match="does not continue a text"):
        BigramTable.of(toys.model("whisper"))
