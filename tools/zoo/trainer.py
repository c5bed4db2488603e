"""The training procedure of a bundled checkpoint; a trainer module declares only what differs.

Such a module exposes `ABOUT`, `NOTES`, `HELD_OUT`, `train` and `measure` of one
`CheckpointTrainer`, the protocol of `mmspec.zoo.training.Trainer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import nn

from mmspec.modality import Entry
from mmspec.training.fitting import CosineDecay, TrainingProgress, TrainingRun
from mmspec.zoo.training import load_teacher, save_on_exit

Plan = TypeVar("Plan")
Parts = TypeVar("Parts")


def _report_no_modules(parts: Any) -> Sequence[nn.Module]:
    return ()


@dataclass(frozen=True)
class Setup(Generic[Plan]):
    """The inputs of one training."""

    entry: Entry
    plan: Plan
    run: TrainingRun
    target: Any  # the model that the checkpoint drafts for; None for a target


@dataclass(frozen=True)
class CheckpointTrainer(Generic[Plan, Parts]):
    """Trains and evaluates the checkpoints of one module, by their plans.

    `build` makes the parts: data, pretrained parts and untrained modules. `fit` runs the stages,
    `save` writes the parts; on an interrupt during `fit` they are saved as they are. `decays` are
    the stages whose steps are reported, `modules` those whose parameters are counted.
    """

    about: str  # description of the model, for its card
    notes: str  # description of the figures, for the card
    held_out: int  # evaluation examples
    plans: Mapping[str, Plan]  # by checkpoint name
    build: Callable[[Setup[Plan]], Parts]
    fit: Callable[[Setup[Plan], Parts], None]
    save: Callable[[Setup[Plan], Parts, Path], None]
    evaluate: Callable[[Entry, Path, int], dict[str, float]]
    decays: Callable[[Plan], Sequence[CosineDecay]]
    modules: Callable[[Parts], Sequence[nn.Module]] = _report_no_modules

    def train(
        self, entry: Entry, folder: Path, steps: int | None, seed: int, progress: TrainingProgress
    ) -> dict[str, Any]:
        """Train a checkpoint and write it to `folder`; returns steps and parameters."""
        target = None if entry.target is None else load_teacher(entry.target)
        setup = Setup(entry, self.plans[entry.name], TrainingRun(seed, steps, progress), target)
        parts = self.build(setup)
        with save_on_exit(lambda: self.save(setup, parts, folder)):
            self.fit(setup, parts)
        decays, modules = self.decays(setup.plan), self.modules(parts)
        figures = {"steps": sum(setup.run.limit_steps(decay.steps) for decay in decays)}
        if modules:
            figures["parameters"] = sum(p.numel() for part in modules for p in part.parameters())
        return figures

    def measure(self, entry: Entry, folder: Path, count: int) -> dict[str, float]:
        """Figures of a written checkpoint on `count` held-out examples."""
        return self.evaluate(entry, folder, count)
