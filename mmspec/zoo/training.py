"""Train a bundled checkpoint: the procedure shared by all modalities."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from mmspec.modality import Entry
from mmspec.training.fitting import TrainingProgress, silent
from mmspec.zoo.catalogue import holds_model, info, is_present, load, path

MEASURED = "measured.json"  # the report of a draft model with a budget
MAX_MINUTES = 1440.0
_TRIAL = 2  # held-out examples for the evaluation of a run with `steps`


class Trainer(Protocol):
    """The module that `Entry.trainer` names."""

    ABOUT: str  # description of the model, for its card
    NOTES: str  # description of the figures, for the card
    HELD_OUT: int  # evaluation examples

    def train(
        self, entry: Entry, folder: Path, steps: int | None, seed: int, progress: TrainingProgress
    ) -> dict[str, Any]: ...  # writes the checkpoint; returns figures of the training

    def measure(
        self, entry: Entry, folder: Path, count: int
    ) -> dict[str, float]: ...  # evaluates the written checkpoint


class BudgetTrainer(Protocol):
    """A `Trainer` of draft models for CPU minutes instead of steps, on a pool of answers.

    `answers` is the folder of the pool; None = in the user's cache.
    """

    ABOUT: str
    NOTES: str
    HELD_OUT: int
    MINUTES: float  # the default

    def names(self, target: str) -> list[Entry]: ...  # the draft models of a target, in order

    def train(
        self,
        entry: Entry,
        folder: Path,
        steps: int | None,
        seed: int,
        progress: TrainingProgress,
        minutes: float,
        answers: Path | None,
    ) -> dict[str, Any]: ...

    def measure(
        self, entry: Entry, folder: Path, count: int, answers: Path | None
    ) -> dict[str, Any]: ...


def train(
    name: str | Entry,
    out: Path | None = None,
    steps: int | None = None,
    seed: int = 0,
    progress: TrainingProgress = silent,
    force: bool = False,
    minutes: float | None = None,
    answers: Path | None = None,
) -> dict[str, Any]:
    """Train a checkpoint, write it to `out` (default: its folder in the package) and evaluate it.

    `steps` limits every stage. Checkpoints that it is trained on must exist. The folder is created
    at the end; `force` allows to replace an existing one. An interrupted run leaves its weights in
    a folder with the suffix ".part". The report is measured on the written files and is part of
    the model card. A draft model with a `BudgetTrainer` is trained for `minutes` on the pool in
    `answers`; its report is also written to "measured.json". Raises ValueError if the folder holds
    other files, and for minutes of others.
    """
    import torch

    entry = name if isinstance(name, Entry) else info(name)
    folder = (folder_of(entry) if out is None else Path(out)).resolve()
    _check(entry, folder, force)
    trainer = import_module_of(entry.trainer, entry.name)
    options = _budget_options(entry, trainer, minutes, answers)
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    started = time.monotonic()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = trainer.train(entry, part, steps, seed, progress, **options)
        wall = round((time.monotonic() - started) / 60, 1)
        size = sum(file.stat().st_size for file in part.rglob("*.safetensors"))
        options.pop("minutes", None)
        count = trainer.HELD_OUT if steps is None else _TRIAL
        found = trainer.measure(entry, part, count, **options)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and holds_model(part):
            raise KeyboardInterrupt(f"interrupted; the weights so far are in {part}") from error
        shutil.rmtree(part, ignore_errors=True)
        raise
    trial = {} if steps is None or not options else {"limit_of_steps": steps}
    report = {"name": entry.name, "seed": seed, **trial, **made, "minutes": wall, "bytes": size}
    report |= found
    (part / "README.md").write_text(_card(entry, trainer, report))
    if options:
        (part / MEASURED).write_text(json.dumps(report, indent=2) + "\n")
    _put(part, folder)
    return report


def folder_of(entry: Entry) -> Path:
    """The folder of a checkpoint in the package, also of one that the catalogue does not list."""
    return path(entry.target or entry.name).with_name(entry.name)


def _budget_options(
    entry: Entry, trainer: Any, minutes: float | None, answers: Path | None
) -> dict[str, Any]:
    """What a `BudgetTrainer` takes in addition.

    Raises ValueError where another one gets it, and for minutes out of range.
    """
    default = vars(trainer).get("MINUTES")
    if default is not None:
        budget = default if minutes is None else float(minutes)
        check_minutes(budget)
        return {"minutes": budget, "answers": answers}
    if minutes is not None or answers is not None:
        raise ValueError(
            f"{entry.name} is trained for a number of steps and on answers of its own; drop "
            "--minutes and --answers"
        )
    return {}


def check_minutes(minutes: float) -> None:
    """Refuse a budget out of range. Raises ValueError."""
    if not 0 < minutes <= MAX_MINUTES:
        raise ValueError(f"--minutes {minutes:g} must be more than 0, at most {MAX_MINUTES:g}")


def import_module_of(module: str, what: str) -> Any:
    """Import a trainer of `what`; `tools` is in the repository and not in the wheel.

    Raises ValueError outside a checkout.
    """
    if module.startswith("tools."):
        checkout = Path(__file__).resolve().parents[2]
        if not (checkout / "tools" / "zoo" / "__init__.py").is_file():
            raise ValueError(
                f"training {what} needs the module {module}, which is not part of the "
                "installed package; run `mmspec zoo train` in a checkout of the repository that "
                "was installed with `pip install -e .`"
            )
        if str(checkout) not in sys.path:
            sys.path.append(str(checkout))
    return import_module(module)


def require_checkpoint(name: str) -> Path:
    """Return the folder of a checkpoint used for training. Raises ValueError if it is missing."""
    folder = path(name)
    if not is_present(name):
        raise ValueError(f"{name} is not in {folder.parent}, but is needed here; train it first")
    return folder


def load_teacher(name: str) -> Any:
    """Load a checkpoint used for training. Raises ValueError if it is missing."""
    require_checkpoint(name)
    return load(name)


@contextmanager
def save_on_exit(save: Callable[[], None]) -> Iterator[None]:
    """Save the weights at the end of the block, or when the user interrupts it."""
    try:
        yield
    except KeyboardInterrupt:
        save()
        raise
    save()


def _check(entry: Entry, folder: Path, force: bool) -> None:
    """Refuse to overwrite other files, and an existing checkpoint without `force`."""
    if not folder.exists() or not any(folder.iterdir()):
        return
    card = folder / "README.md"
    if not card.is_file() or not card.read_text().startswith(f"# {entry.name}\n"):
        raise ValueError(f"{folder} holds files other than {entry.name}; give an empty folder")
    if not force:
        raise ValueError(
            f"{entry.name} is in {folder} already; give --out another folder (out=), or --force "
            "(force=True) to overwrite it"
        )


def _put(part: Path, folder: Path) -> None:
    """Rename a folder to one that is empty, is missing, or is to be replaced."""
    old = folder.with_name(f"{folder.name}.old")
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    if old.exists():
        shutil.rmtree(old)


def _card(entry: Entry, trainer: Trainer, report: dict[str, Any]) -> str:
    """Write the model card: description, training command, figures and their meaning."""
    minutes = report.get("budget_minutes", vars(trainer).get("MINUTES"))
    given = "" if minutes == vars(trainer).get("MINUTES") else f" --minutes {minutes:g}"
    figures = "".join(
        f"| {key.replace('_', ' ')} | {_format(value)} |\n" for key, value in report.items()
    )
    return (
        f"# {entry.name}\n\n{entry.description}\n\n{trainer.ABOUT.strip()}\n\n"
        f"Made by:\n\n```\nmmspec zoo train {entry.name}{given}\n```\n\n"
        f"| | |\n|---|---|\n{figures}\n{trainer.NOTES}"
    )


def _format(value: Any) -> str:
    """A figure of a card: "caption 3.1, chart 2.4" and "1.2, 0.9" where there are several."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_format(one)}" for name, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(_format, value))
    return "-" if value is None else str(value)
