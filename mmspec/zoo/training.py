"""Train a bundled checkpoint: the procedure shared by all modalities."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from mmspec.modality import Entry
from mmspec.training.fitting import TrainingProgress, silent
from mmspec.zoo.catalogue import holds_model, info, is_present, load, path

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


def train(
    name: str,
    out: Path | None = None,
    steps: int | None = None,
    seed: int = 0,
    progress: TrainingProgress = silent,
    force: bool = False,
) -> dict[str, Any]:
    """Train a checkpoint, write it to `out` (default: its folder in the package) and evaluate it.

    `steps` limits every stage. Checkpoints that it is trained on must exist. The folder is created
    at the end; `force` allows to replace an existing one. An interrupted run leaves its weights in
    a folder with the suffix ".part". The report is measured on the written files and is part of
    the model card. Raises ValueError if the folder holds other files.
    """
    import torch

    entry = info(name)
    folder = (path(entry.name) if out is None else Path(out)).resolve()
    _check(entry, folder, force)
    trainer = cast(Trainer, _import_trainer(entry))
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    started = time.monotonic()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = trainer.train(entry, part, steps, seed, progress)
        minutes = round((time.monotonic() - started) / 60, 1)
        size = sum(file.stat().st_size for file in part.rglob("*.safetensors"))
        found = trainer.measure(entry, part, trainer.HELD_OUT if steps is None else _TRIAL)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and holds_model(part):
            raise KeyboardInterrupt(f"interrupted; the weights so far are in {part}") from error
        shutil.rmtree(part, ignore_errors=True)
        raise
    report = {"name": entry.name, "seed": seed, **made, "minutes": minutes, "bytes": size, **found}
    (part / "README.md").write_text(_card(entry, trainer, report))
    _put(part, folder)
    return report


def _import_trainer(entry: Entry) -> Any:
    """Import the trainer of a checkpoint; `tools` is in the repository and not in the wheel.

    Raises ValueError outside a checkout.
    """
    if entry.trainer.startswith("tools."):
        checkout = Path(__file__).resolve().parents[2]
        if not (checkout / "tools" / "zoo" / "__init__.py").is_file():
            raise ValueError(
                f"{entry.name} is trained by the module {entry.trainer}, which is not part of the "
                "installed package; run `mmspec zoo train` in a checkout of the repository that "
                "was installed with `pip install -e .`"
            )
        if str(checkout) not in sys.path:
            sys.path.append(str(checkout))
    return import_module(entry.trainer)


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
    figures = "".join(f"| {key.replace('_', ' ')} | {value} |\n" for key, value in report.items())
    return (
        f"# {entry.name}\n\n{entry.description}\n\n{trainer.ABOUT.strip()}\n\n"
        f"Made by:\n\n```\nmmspec zoo train {entry.name}\n```\n\n"
        f"| | |\n|---|---|\n{figures}\n{trainer.NOTES}"
    )
