"""The second table: how hard the requests of each category are to guess."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mmspec import _hf, recipes, zoo
from mmspec.bench.constant_drafter import CONTROL
from mmspec.bench.results.lines import Line
from mmspec.bench.results.records import Record
from mmspec.bench.results.systems import CATEGORY, Group, Job
from mmspec.modality import Workload
from mmspec.recipe import STATES
from mmspec.zoo.requests import CATEGORIES, is_trained_on_requests

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
    head: str | None  # the recipe; None = the target has no trained head
    lines: tuple[CategoryLine, ...]

    def markdown(self) -> list[str]:
        """The table, with its explanation."""
        head = "It has no trained head yet." if self.head is None else f"Head: `{self.head}`."
        text = [f"## Categories of requests to `{self.model}`", "", ABOUT, head]
        text += ["", f"| {' | '.join(TITLES)} |", f"|{'---|' * len(TITLES)}"]
        for one in self.lines:
            numbers = (one.tokens, one.entropy, one.constant, one.lookup, one.head)
            shown = ["" if value is None else f"{value:.2f}" for value in numbers]
            text.append(f"| {' | '.join([one.category, *shown])} |")
        return text


def find_target(group: Group) -> str | None:
    """The first target of a section that is trained on the requests."""
    return next(filter(is_trained_on_requests, group.present), None)


def find_best_head(model: str, lines: Sequence[Line]) -> str | None:
    """The exact recipe with a head of a target's states that accepts most in its lines.

    Without such lines `HEAD`, or None where none is bundled.
    """
    heads = [
        one
        for one in lines
        if one.recipe is not None
        and one.model == model
        and one.drafter is not None
        and one.promise == "exact"
        and recipes.get(one.recipe).sees == STATES
        and one.acceptance_length is not None
        and ", " not in one.name  # as published
    ]
    best = max(heads, key=lambda one: one.acceptance_length or 0.0, default=None)
    if best is not None:
        return best.recipe
    return HEAD if zoo.drafter_for(model, recipes.get(HEAD)) else None


def plan_categories(group: Group, model: str, head: str | None) -> list[Job]:
    """One job per category."""
    measured, settings = tuple(filter(None, (LOOKUP, head))), dict(group.settings)
    return [
        Job(f"{CATEGORY} {one}", group, model, measured, {**settings, "kind": one})
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
    model: str, head: str | None, found: Sequence[tuple[Job, Record | None]]
) -> CategoryTable:
    """The table of the records of all categories that were measured."""
    lines = [_line(str(job.settings["kind"]), head, one) for job, one in found if one is not None]
    return CategoryTable(model, head, tuple(lines))


def add_entropy(record: Record, model: Any, workload: Workload, seed: int) -> Record:
    """The record of a category with the entropy of its requests."""
    entropy = measure_entropy(model, workload, seed)
    return replace(record, environment={**record.environment, "entropy": entropy})


def _line(category: str, head: str | None, record: Record) -> CategoryLine:
    rows = {row.recipe: row for row in (*record.rows, *record.baselines)}
    plain = rows.get("plain")

    def accepted(name: str | None) -> float | None:
        return rows[name].mean_acceptance_length if name in rows else None

    return CategoryLine(
        category,
        None if plain is None else plain.extras.get("tokens per request"),
        record.environment.get("entropy"),
        *(accepted(name) for name in (CONTROL, LOOKUP, head)),
    )
