"""`mmspec bench --recipe all` leaves out recipes that would draft nothing, with their reasons."""

from __future__ import annotations

from typing import Any

import pytest

import mmspec
from mmspec.cli.bench import find_idle
from mmspec.drafters.lookup.datastore import Datastore
from mmspec.modality import Workload
from tests import toys

IDLE = {"rest": "datastore", "hsd": "draft_file", "token-map": "map"}


@pytest.mark.parametrize("supplies", [(), ("draft_file",)])
def test_what_drafts_nothing_is_left_out_with_its_reason(supplies: tuple[str, ...]) -> None:
    models = {name: mmspec.accelerate(toys.model("llama"), name) for name in IDLE}
    models["prompt-lookup"] = mmspec.accelerate(toys.model("llama"), "prompt-lookup")
    nothing: Any = None
    found = find_idle(models, Workload((), nothing, nothing, supplies=supplies))
    assert {*found} == {name for name, option in IDLE.items() if option not in supplies}
    for name, reason in found.items():
        assert f"drafts nothing without {IDLE[name]}" in reason
        assert f"--set {name}.{IDLE[name]}=FILE" in reason


def test_what_is_given_its_texts_is_measured() -> None:
    store = Datastore.of([[1, 2, 3, 4]])
    fast = mmspec.accelerate(toys.model("llama"), "rest", datastore=store)
    nothing: Any = None
    assert not find_idle({"rest": fast}, Workload((), nothing, nothing))
