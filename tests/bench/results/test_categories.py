"""The table of categories: entropies by hand, and the head that accepts most."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmspec.bench.constant_drafter import CONTROL
from mmspec.bench.results.categories import (
    HEAD,
    LOOKUP,
    find_best_head,
    make_table,
    measure_entropy,
    plan_categories,
)
from mmspec.bench.results.lines import Line
from mmspec.bench.results.records import Record
from mmspec.bench.results.systems import read_groups
from mmspec.bench.row import Row
from mmspec.modalities.common.measures import request_workload
from mmspec.modalities.common.tiny_models import tiny_llama
from mmspec.modalities.vlm import REQUEST_KINDS, tiny_models
from mmspec.zoo.requests import CATEGORIES

GROUP = read_groups()["vlm"]


def test_the_kinds_of_the_command_line_are_the_categories() -> None:
    assert {"caption", *REQUEST_KINDS} == set(CATEGORIES)


def test_the_best_head_is_an_exact_one_as_published() -> None:
    def line(name: str, recipe: str, accepted: float, promise: str = "exact") -> Line:
        one: dict[str, Any] = {
            "drafter": "zoo:head",
            "promise": promise,
            "acceptance_length": accepted,
        }
        return Line("vlm", name, "zoo:llava", recipe, **one)

    lines = [
        *(line("HiViS", "hivis", 3.0), line("MSD", "msd", 4.0), line("coupled", "coupled", 9.0)),
        *(line("MSD, tree=auto", "msd", 9.0), line("other", "dream", 9.0, "lossy")),
    ]
    assert find_best_head("zoo:llava", lines) == "msd"
    assert find_best_head("zoo:llava", []) == HEAD
    assert find_best_head("zoo:video", lines) is None  # lines of another target


def test_the_table_has_what_each_drafter_accepts() -> None:
    jobs = plan_categories(GROUP, "zoo:llava", HEAD)
    assert [job.settings["kind"] for job in jobs] == [*CATEGORIES]
    plain = Row("plain", extras={"tokens per request": 47.0})
    rows = (plain, Row(LOOKUP, mean_acceptance_length=1.5), Row(HEAD, mean_acceptance_length=4.0))
    control = (Row(CONTROL, mean_acceptance_length=1.1),)
    record = Record({}, rows, control, {}, {"entropy": 0.5}, 4, 4, 0)
    table = make_table("zoo:llava", HEAD, [(jobs[0], record), (jobs[1], None)])
    assert "| short-question | 47.00 | 0.50 | 1.10 | 1.50 | 4.00 |" in table.markdown()
    assert len(table.lines) == 1
    bare = make_table("zoo:llava", None, [(jobs[0], record)])
    assert bare.lines[0].head is None
    assert [one.recipes for one in plan_categories(GROUP, "zoo:llava", None)] == [(LOOKUP,)] * 6


@torch.no_grad()
def test_the_entropy_is_that_of_the_distributions_until_the_first_end() -> None:
    model = tiny_llama(seed=0)
    request = {**tiny_models.make_request(), "do_sample": False, "max_new_tokens": 6}
    work, start = request_workload(model, [request]), request["input_ids"].shape[1]
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    torch.manual_seed(3)
    with torch.no_grad():
        ids = model.generate(**{**request, **sampling})
        p = model(ids).logits[0, start - 1 : -1].double().softmax(-1)
    entropies, new = -(p * p.log()).sum(-1), ids[0, start:].tolist()
    assert len(new) == 6
    assert measure_entropy(model, work, 3) == pytest.approx(float(entropies.mean()), abs=1e-5)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = new[3]
    kept = entropies[: new.index(new[3]) + 1]
    assert measure_entropy(model, work, 3) == pytest.approx(float(kept.mean()), abs=1e-5)
