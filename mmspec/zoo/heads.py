"""Train all draft models of a bundled target, one after the other, for equal CPU minutes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mmspec.errors import parse_json
from mmspec.modality import Entry
from mmspec.training.fitting import TrainingProgress, silent
from mmspec.zoo.catalogue import FOLDER, info
from mmspec.zoo.training import (
    MEASURED,
    check_minutes,
    import_module_of,
    require_checkpoint,
    train,
)

TRAINER = "tools.zoo.vlm.systems.train"


def train_heads(
    target: str,
    minutes: float | None = None,
    out: Path | None = None,
    answers: Path | None = None,
    seed: int = 0,
    steps: int | None = None,
    force: bool = False,
    progress: Callable[[str], TrainingProgress] = lambda name: silent,
) -> Iterator[tuple[dict[str, Any], bool]]:
    """Train the draft models of a target that `out` lacks; yield reports, and whether each is new.

    `out` (default: the bundled checkpoints) gets a folder per draft model when that is done, so an
    interrupted run is resumed by the same call. `progress` makes the callback of a draft model.
    Raises ValueError before any training for a target that is none, and for draft models in `out`
    that were trained otherwise, unless `force`.
    """
    trainer: Any = import_module_of(TRAINER, f"the draft models of {target}")
    wanted = {"budget_minutes": trainer.MINUTES if minutes is None else float(minutes)}
    wanted |= {"seed": seed, "limit_of_steps": steps}
    _check(target, wanted["budget_minutes"])
    folder = FOLDER / "checkpoints" if out is None else Path(out).resolve()
    entries: list[Entry] = trainer.names(info(target).name)
    done = {one.name: _find_report(folder / one.name, wanted, force) for one in entries}
    for entry in entries:
        report = done[entry.name]
        if report is not None:
            yield report, False
            continue
        made = train(
            *(entry, folder / entry.name, steps, seed, progress(entry.name)),
            force=force,
            minutes=wanted["budget_minutes"],
            answers=answers,
        )
        yield made, True


def _check(target: str, minutes: float) -> None:
    """Refuse draft models as targets, missing ones, and budgets out of range. Raises ValueError."""
    if info(target).target is not None:
        raise ValueError(
            f"{target} is a draft model of {info(target).target}; give --target a target"
        )
    require_checkpoint(info(target).name)
    check_minutes(minutes)


def _find_report(folder: Path, wanted: dict[str, Any], force: bool) -> dict[str, Any] | None:
    """The report of a draft model that is done; None where it is to be trained."""
    if not folder.exists() or not any(folder.iterdir()):
        return None
    file = folder / MEASURED
    found: dict[str, Any] = parse_json(file.read_bytes()) if file.is_file() else {}
    other = [name for name, value in wanted.items() if found.get(name) != value]
    if not other:
        return found
    if force:
        return None
    raise ValueError(
        f"{folder} was trained with {other[0]}={json.dumps(found.get(other[0]))}, not "
        f"{json.dumps(wanted[other[0]])}; give --out another folder, or --force to train it again"
    )
