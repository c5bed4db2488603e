"""Train the draft models of the survey's vision-language systems: one pool, one budget, own losses.

mmspec zoo train heads --all --minutes 20 --target llava-chat
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmspec.modalities.common.families import make_reader
from mmspec.modality import Entry
from mmspec.models.compatibility import sign_head
from mmspec.targets.readers.reader import Reader
from mmspec.training.fitting import TrainingProgress, TrainingRun, split_parameters
from mmspec.training.small_model import TrainableSmallModel
from mmspec.zoo.catalogue import processor
from mmspec.zoo.training import load_teacher, save_on_exit
from tools.zoo.vlm.systems.budget import CpuBudget, LossCurve, fit_until
from tools.zoo.vlm.systems.examples import ExampleSource, cache_states
from tools.zoo.vlm.systems.measure import measure_head
from tools.zoo.vlm.systems.plans import PLANS, Plan, Stage, entry_of, plan_of
from tools.zoo.vlm.systems.pool import AnswerPool, default_folder, load_pool
from tools.zoo.vlm.systems.small import SightedModel, save_small

ABOUT = """\
One of the draft models of the survey's systems: all are trained on the same answers of the target
for the same CPU minutes of one core, each by its own losses; it fits no other target.
"""
NOTES = """\
`training minutes` are CPU minutes without the target's forwards, which all have alike; `loss curve`
is the mean loss in each tenth of them, of different losses where there are stages. `acceptance` is
tokens per round of greedy chain speculation with five drafted tokens, on held-out requests, by
category. `acceptance with other pictures` is the same where the draft model, and not the target,
sees the picture of another request. Measured by decoding with the float16 weights, run in float32.
"""
HELD_OUT = 10  # requests per category
MINUTES = 20.0  # default budget
ANSWERED = 250  # requests per category of the pool


def names(target: str) -> list[Entry]:
    """The draft models of a target, in the order of training."""
    return [entry_of(target, head) for head in PLANS]


def train(
    entry: Entry,
    folder: Path,
    steps: int | None,
    seed: int,
    progress: TrainingProgress,
    minutes: float = MINUTES,
    answers: Path | None = None,
) -> dict[str, Any]:
    """Train a draft model on the pool in the folder `answers` (default: in the user's cache)."""
    assert entry.target is not None
    plan, run = plan_of(entry), TrainingRun(seed, steps, progress)
    torch.set_num_threads(1)
    model = load_teacher(entry.target)
    count = run.limit_steps(ANSWERED, 4)
    root = default_folder() if answers is None else answers
    pool = load_pool(entry.target, count, root, progress=progress)
    reader = make_reader(model)
    caches = cache_states(pool, reader, progress) if plan.caches else {}
    source = ExampleSource(pool, reader, seed, caches=caches)
    head = begin_head(plan, reader, pool, processor(entry.target))
    curve, budget = LossCurve(), CpuBudget(minutes)

    def finish() -> None:
        write_head(head, reader, folder, processor(str(entry.target)))

    done, counts = 0.0, []
    with save_on_exit(finish), budget.without(model):
        for stage in plan.stages:
            done += stage.share
            counts.append(run_stage(plan, stage, source, head, budget, curve, run, min(done, 1.0)))
    return {
        **{"recipe": plan.recipe, "losses": "; then ".join(one.about for one in plan.stages)},
        **{"budget_minutes": minutes, "training_minutes": round(budget.used() / 60, 2)},
        **{"answers": len(pool.answers), "steps": sum(counts), "steps_of_stages": counts},
        **{"parameters": sum(one.numel() for one in head.parameters())},
        **({"size": plan.size} if plan.size else {}),
        "loss_curve": curve.points(),
    }


def begin_head(plan: Plan, reader: Reader, pool: AnswerPool, made: Any) -> Any:
    """Make the untrained draft model of a plan."""
    counts = torch.zeros(reader.vocabulary, dtype=torch.int64)
    more = {"processor": made} if plan.sees == "pixels" else {}
    head: Any = plan.begin(reader, counts, **plan.changes, **more)
    return head.float().train()


def run_stage(
    plan: Plan,
    stage: Stage,
    source: ExampleSource,
    head: Any,
    budget: CpuBudget,
    curve: LossCurve,
    run: TrainingRun,
    stop: float,
) -> int:
    """Train one stage until the share `stop` of the budget; returns its steps."""
    trained = list(stage.trains(head))
    chosen = set(map(id, trained))
    matrices, others = split_parameters(plan.matrices(head), trained)
    matrices = [one for one in matrices if id(one) in chosen]

    def loss_of(done: float) -> Tensor:
        return stage.loss(source.reader, head, stage.draw(source, done))

    parameters = (matrices, others)
    return fit_until(stop, budget, curve, loss_of, parameters, stage.rate, "head", run)


def write_head(head: Any, reader: Reader, folder: Path, made: Any) -> None:
    """Write a draft model in float16."""
    head.train(False)
    if isinstance(head, SightedModel | TrainableSmallModel):
        save_small(head, folder, made)
        return
    sign_head(head, reader)
    head.half().save_pretrained(folder)


def measure(entry: Entry, folder: Path, count: int, answers: Path | None = None) -> dict[str, Any]:
    """Acceptance lengths on held-out requests by category, and with other pictures."""
    assert entry.target is not None
    root = default_folder() if answers is None else answers
    return measure_head(plan_of(entry), entry.target, folder, root, count)
