"""Drafts from a datastore: exact output with any, and few calls with the right one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import mmspec
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.lookup.datastore import Datastore
from mmspec.drafters.lookup.rest import RetrievalDrafter
from tests import toys
from tests.drafters.driving import context

ROOM = 12


def test_rows_are_looked_up_alone_and_finished_ones_are_not() -> None:
    drafter = RetrievalDrafter(Datastore.of([[1, 2, 3, 4], [5, 6, 7]]), Fixed(2))
    now = context([9, 1, 2], [5, 6], [3, 1])
    draft = drafter.propose(now, drafter.begin(now))
    assert draft.tokens.tolist() == [[3, 4], [7, 6], [1, 1]]
    assert draft.mask.tolist() == [[True, True], [True, False], [False, False]]
    now = replace(context([1, 2], [1, 2]), finished=(True, False))
    assert drafter.propose(now, drafter.begin(now)).mask.tolist() == [[False] * 2, [True] * 2]


def test_image_placeholders_end_a_draft() -> None:
    drafter = RetrievalDrafter(Datastore.of([[1, 2, 3, 9, 4]]), Fixed(4), ignore=(9,))
    now = context([1, 2])
    assert drafter.propose(now, drafter.begin(now)).tokens.tolist() == [[3]]


@pytest.mark.parametrize("family", ["llama", "llava"])
def test_output_is_the_targets_with_any_datastore(family: str, tmp_path: Path) -> None:
    model, request = toys.model(family), toys.inputs(family, batch=3)
    expected = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    rows = [row[-ROOM:].tolist() for row in expected]
    right, wrong = Datastore.of(rows), Datastore.of([row[::-1] for row in rows])
    right.save(tmp_path / "store.npz")
    for known in (None, wrong, right, str(tmp_path / "store.npz")):
        fast = mmspec.accelerate(model, "rest", datastore=known)
        out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
        assert torch.equal(out.sequences, expected)
        drawn: dict[str, Any] = {"max_new_tokens": ROOM, "temperature": 1.0, "seed": 1}
        plain = mmspec.decode_plain(model, **request, **drawn)
        assert torch.equal(fast.generate(**request, **drawn).sequences, plain.sequences)


def test_calls_without_a_datastore_and_with_one_that_has_the_output() -> None:
    model, request = toys.model("llama"), toys.inputs("llama")
    plain = mmspec.decode_plain(model, **request, max_new_tokens=ROOM)
    whole = plain.sequences[0].tolist()

    def calls(datastore: Datastore | None) -> int:
        fast = mmspec.accelerate(model, "rest", datastore=datastore, length=5, longest=40)
        return int(fast.generate(**request, max_new_tokens=ROOM).stats.target_calls)

    assert calls(None) == ROOM - 1
    assert calls(Datastore.of([whole])) == -(-(ROOM - 1) // 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"datastore": 3}, "datastore is an int"),
        ({"datastore": "nowhere.npz"}, "is not a datastore"),
        ({"datastore": Datastore.of([[1, 9999]])}, "token id 9999, but .* tokenizer"),
        ({"shortest": 0}, "shortest=0 must be at least 1"),
        ({"shortest": 20}, "at most longest=16"),
        ({"longest": 250}, "a draft of 10 tokens exceed the 256"),
    ],
)
def test_other_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mmspec.accelerate(toys.model("llama"), "rest", **options)
