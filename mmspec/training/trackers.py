"""Log a training to TensorBoard or Weights & Biases, by the trackers of `accelerate`.

    trackers = Trackers.start(("tensorboard",), folder, {"steps": 2000}, first_step=0)
    trackers.log({"loss": 2.3}, step=1)
    trackers.finish()

Needs `pip install mmspec[train]` and the tracker's own package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}
PROJECT = "mmspec"


@dataclass(frozen=True)
class Trackers:
    """Trackers of one process; none by default."""

    trackers: Sequence[Any] = ()

    @classmethod
    def start(
        cls, names: Sequence[str], folder: Path, settings: Mapping[str, Any], first_step: int
    ) -> Trackers:
        """Start trackers that write to a folder, and log the settings of the training.

        TensorBoard drops what it has of later steps than `first_step`. Raises ValueError for a
        tracker that cannot start.
        """
        check_trackers(names)
        return cls([_start(name, folder, settings, first_step) for name in names])

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log values of a step."""
        for tracker in self.trackers:
            tracker.log(dict(values), step=step)

    def finish(self) -> None:
        """Write what is pending."""
        for tracker in self.trackers:
            tracker.finish()


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers whose packages are missing. Raises ValueError naming them."""
    for name in names:
        for package, extra in (("accelerate", "mmspec[train]"), (PACKAGES[name], PACKAGES[name])):
            if find_spec(package) is None:
                raise ValueError(
                    f"--track {name} needs the package {package}; install {extra}, or drop --track"
                )


def _start(name: str, folder: Path, settings: Mapping[str, Any], first_step: int) -> Any:
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState(cpu=not torch.cuda.is_available())  # of the processes, or of this one
    folder.mkdir(parents=True, exist_ok=True)
    kind: Any = LOGGER_TYPE_TO_CLASS[name]
    try:
        if name == "tensorboard":
            tracker = kind(run_name=name, logging_dir=str(folder), purge_step=first_step + 1)
        else:
            own = {"name": folder.parent.name, "group": folder.parent.name}
            tracker = kind(run_name=PROJECT, dir=str(folder), **own)
        tracker.main_process_only = False  # the other processes have none
        tracker.start()
        if name == "wandb":  # a TensorBoard run of settings alone would be one more in its list
            tracker.store_init_configuration(dict(settings))
    except Exception as error:  # whatever a service or its package raises
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"--track {name} cannot start ({reason}); correct its settings, or drop --track"
        ) from error
    return tracker
