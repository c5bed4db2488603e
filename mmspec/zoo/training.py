"""Train a checkpoint of the zoo: one way for all, whatever a modality teaches it."""

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
from mmspec.training.reporting import Report, silent
from mmspec.zoo.catalogue import holds_model, info, is_present, path
from mmspec.zoo.loading import load

_TRIAL = 2  # held-out examples that a short trial is measured on


class Trainer(Protocol):
    """The module that an entry of the catalogue names."""

    ABOUT: str  # what the card says of the model
    NOTES: str  # and of its figures
    HELD_OUT: int  # examples that it is measured on

    def train(
        self, entry: Entry, folder: Path, steps: int | None, seed: int, progress: Report
    ) -> dict[str, Any]: ...  # writes the checkpoint; figures of how it was made

    def measure(
        self, entry: Entry, folder: Path, count: int
    ) -> dict[str, float]: ...  # figures of how good it is, by what was written


def train(
    name: str,
    out: Path | None = None,
    steps: int | None = None,
    seed: int = 0,
    progress: Report = silent,
    force: bool = False,
) -> dict[str, Any]:
    """Train a checkpoint, write it to `out` (its folder in the package by default) and measure it.

    Every stage is cut to `steps` if given. What it learns from must be in the package, so train
    that first. The folder appears when all is done, in place of an older one only with `force`;
    what was learnt when the user interrupts lies beside it, in a folder that ends in ".part". The
    report, also kept in the model card, is measured on what was written. Raises ValueError where
    something else lies in the folder.
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
            raise KeyboardInterrupt(f"interrupted; what was learnt is in {part}") from error
        shutil.rmtree(part, ignore_errors=True)
        raise
    report = {"name": entry.name, "seed": seed, **made, "minutes": minutes, "bytes": size, **found}
    (part / "README.md").write_text(_card(entry, trainer, report))
    _put(part, folder)
    return report


def _import_trainer(entry: Entry) -> Any:
    """The module that trains a checkpoint; ours lie in the repository and not in the wheel.

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


def written(name: str) -> Path:
    """The folder of a checkpoint that others learn from. Raises ValueError where there is none."""
    folder = path(name)
    if not is_present(name):
        raise ValueError(f"{name} is not in {folder.parent}, and this one learns from it; train it")
    return folder


def teacher(name: str) -> Any:
    """A checkpoint that others learn from. Raises ValueError where there is none."""
    written(name)
    return load(name)


@contextmanager
def kept(save: Callable[[], None]) -> Iterator[None]:
    """Save what is learnt here: all of it, or what there is when the user interrupts."""
    try:
        yield
    except KeyboardInterrupt:
        save()
        raise
    save()


def _check(entry: Entry, folder: Path, force: bool) -> None:
    """Refuse to overwrite what is not ours, and what is ours unless told to."""
    if not folder.exists() or not any(folder.iterdir()):
        return
    card = folder / "README.md"
    if not card.is_file() or not card.read_text().startswith(f"# {entry.name}\n"):
        raise ValueError(f"{folder} holds something else than {entry.name}; give an empty folder")
    if not force:
        raise ValueError(
            f"{entry.name} is in {folder} already; give --out another folder (out=), or --force "
            "(force=True) to overwrite it"
        )


def _put(part: Path, folder: Path) -> None:
    """Rename a folder to one that is empty, is not there, or is to be replaced."""
    old = folder.with_name(f"{folder.name}.old")
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    if old.exists():
        shutil.rmtree(old)


def _card(entry: Entry, trainer: Trainer, report: dict[str, Any]) -> str:
    """What a checkpoint is, how it was made, its figures and what they mean."""
    figures = "".join(f"| {key.replace('_', ' ')} | {value} |\n" for key, value in report.items())
    return (
        f"# {entry.name}\n\n{entry.description}\n\n{trainer.ABOUT.strip()}\n\n"
        f"Made by:\n\n```\nmmspec zoo train {entry.name}\n```\n\n"
        f"| | |\n|---|---|\n{figures}\n{trainer.NOTES}"
    )
