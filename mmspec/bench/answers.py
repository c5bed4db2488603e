"""Compare ways to answer whole questions, for systems whose drafts are whole answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mmspec.bench.compare import PLAIN, Comparison
from mmspec.bench.reporting import Progress, describe_environment, silent
from mmspec.bench.row import Measurements, Row, make_row, measure_qualities
from mmspec.bench.timing import time_runners
from mmspec.bench.workload import Scored, fact_accuracy
from mmspec.modality import Runner, RunResult, RunResults, Workload

FACTS = "facts right"


def wrap_answer(text: str) -> RunResult:
    """Return an answer as the result of a runner."""
    return RunResult(None, 1, 0, exact=False, output=text)


def measure_answers(
    model: str,
    modality: str,
    runners: Mapping[str, Runner],
    requests: Sequence[Mapping[str, Any]],
    judged: RunResults,
    score: Callable[[Sequence[RunResult]], Scored],
    repeats: int = 1,
    seed: int = 0,
    progress: Progress = silent,
) -> Comparison:
    """Time the runners on `requests`, one at a time, and score the answers that all ways gave.

    `judged` has the answers of every way to the same questions, more of them than are timed. The
    plain runner is "plain". Ways without a runner are baselines without a speed.
    """
    timings = time_runners(runners, requests, repeats, seed=seed, progress=progress).timings
    work = Workload(requests, runners[PLAIN], lambda fast: fast, qualities=(fact_accuracy(score),))
    found = Measurements(work, timings, judged, PLAIN, None)
    others = [name for name in judged if name not in runners]
    return Comparison(
        model=model,
        modality=modality,
        rows=[make_row(name, found) for name in runners],
        baselines=[
            Row(name, exact=False, qualities=measure_qualities(found, name)) for name in others
        ],
        controls=[],
        requests=len(requests),
        repeats=repeats,
        judged=len(judged[PLAIN]),
        batch=1,
        settings={},
        peak_memory_bytes=0,
        environment=describe_environment(torch.device("cpu"), 1),
    )


def report_facts(found: Comparison) -> dict[str, float]:
    """Shares of facts right of all ways to answer, with their standard errors, for a card."""
    report = dict[str, float]()
    for row in (*found.rows, *found.baselines):
        facts = row.qualities[FACTS]
        report[f"facts of {row.recipe}"] = round(facts["value"] or 0.0, 4)
        report[f"error of {row.recipe}"] = round(facts["error"] or 0.0, 4)
    return report
