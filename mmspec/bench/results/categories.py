"""The second table: how hard the requests of each category are to guess."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mmspec import _hf, recipes
from mmspec.bench.constant_drafter import CONTROL
from mmspec.bench.results.lines import Line
from mmspec.bench.results.records import Record
from mmspec.bench.results.systems import CATEGORY, Group, Job
from mmspec.modality import Workload
from mmspec.recipe import STATES
from mmspec.zoo.requests import CATEGORIES

LOOKUP, HEAD = "prompt-lookup", "eagle-3"  # HEAD: where no trained head was measured
TITLES = ("category", "tokens", "nats per token", "constant drafter", "prompt lookup", "best head")
ABOUT = """\
Entropy of the next token in plain sampling at temperature 1; tokens per round (greedy) of a drafter
that always proposes the most frequent token, of prompt lookup, and of the head that accepts most in
the table above. *Tokens* are those of an answer, of a conversation of all its turns.
"""


@dataclass(frozen=True)
class CategoryLine:
    """One category; None = not measured."""

    category: str
    tokens: float | None
    entropy: float | None  # nats per token
    constant: float | None  # acceptance lengths
    lookup: float | None
    head: float | None


@dataclass(frozen=True)
class CategoryTable:
    """All categories of the requests to one target."""

    model: str
    head: str
    lines: tuple[CategoryLine, ...]

    def markdown(self) -> list[str]:
        """The table, with its explanation."""
        text = [f"## Categories of requests to `{self.model}`", "", ABOUT, f"Head: `{self.head}`."]
        text += ["", f"| {' | '.join(TITLES)} |", f"|{'---|' * len(TITLES)}"]
        for one in self.lines:
            numbers = (one.tokens, one.entropy, one.constant, one.lookup, one.head)
            shown = ["" if value is None else f"{value:.2f}" for value in numbers]
            text.append(f"| {' | '.join([one.category, *shown])} |")
        return text


def find_best_head(lines: Sequence[Line]) -> str:
    """The exact recipe with a head of the target's states that accepts most in these lines."""
    heads = [
        one
        for one in lines
        if one.recipe is not None
        and one.drafter is not None
        and one.promise == "exact"
        and recipes.get(one.recipe).sees == STATES
        and one.acceptance_length is not None
        and one.name.partition(", ")[2] == ""  # as published
    ]
    best = max(heads, key=lambda one: one.acceptance_length or 0.0, default=None)
    return HEAD if best is None or best.recipe is None else best.recipe


def plan_categories(group: Group, head: str) -> list[Job]:
    """One job per category."""
    settings = dict(group.settings)
    return [
        Job(f"{CATEGORY} {one}", group, group.model, (LOOKUP, head), {**settings, "kind": one})
        for one in CATEGORIES
    ]


@torch.no_grad()
def measure_entropy(model: Any, workload: Workload, seed: int = 0) -> float:
    """Mean entropy (nats) of the next token, in plain samples of all requests at temperature 1."""
    found: list[torch.Tensor] = []
    for index, request in enumerate(workload.timed):
        torch.manual_seed(seed + index)
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        out = model.generate(
            **{**request, **sampling}, return_dict_in_generate=True, output_logits=True
        )
        logits = torch.stack(out.logits, 1).float()  # (B, T, V)
        final = torch.tensor([*_hf.eos_ids(model.generation_config)], device=logits.device)
        ends = torch.isin(out.sequences[:, -logits.shape[1] :], final)
        is_open = ends.cumsum(1) - ends.int() == 0  # up to the first end token
        found.append(torch.distributions.Categorical(logits=logits).entropy()[is_open])
    return float(torch.cat(found).mean())


def make_table(
    group: Group, head: str, found: Sequence[tuple[Job, Record | None]]
) -> CategoryTable:
    """The table of the records of all categories that were measured."""
    lines = [_line(str(job.settings["kind"]), head, one) for job, one in found if one is not None]
    return CategoryTable(group.model, head, tuple(lines))


def add_entropy(record: Record, model: Any, workload: Workload, seed: int) -> Record:
    """The record of a category with the entropy of its requests."""
    entropy = measure_entropy(model, workload, seed)
    return replace(record, environment={**record.environment, "entropy": entropy})


def _line(category: str, head: str, record: Record) -> CategoryLine:
    rows = {row.recipe: row for row in (*record.rows, *record.baselines)}
    plain = rows.get("plain")

    def accepted(name: str) -> float | None:
        return rows[name].mean_acceptance_length if name in rows else None

    return CategoryLine(
        category,
        None if plain is None else plain.extras.get("tokens per request"),
        record.environment.get("entropy"),
        *(accepted(name) for name in (CONTROL, LOOKUP, head)),
    )
