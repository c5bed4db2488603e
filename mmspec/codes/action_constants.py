"""Constants of recipes of actions that depend on robot and task, fitted to episodes of a policy."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mmspec.errors import check_is_file, check_number

FILE = "constants.json"
MOTIONS = ("constant_velocity", "random_walk")


@dataclass(frozen=True)
class ActionConstants:
    """Constants of KERV and HeiSD, which both papers measure on the robot's own task.

    KERV (Zheng et al. 2026): `reference`, the variability at which its radius is smallest, and the
    model and the variances of its filter. HeiSD (Zheng et al. 2026): the similarity `theta` and the
    distance `delta` of a stored moment whose action is accepted unverified; None = from the store.
    `mmspec train constants` fits and saves them. Raises ValueError for an unknown `motion`, and for
    variances and a reference of 0 or below.
    """

    reference: float = 1.0
    motion: str = MOTIONS[0]
    process: float = 1e-2
    measurement: float = 1e-2
    theta: float | None = None
    delta: float | None = None

    def __post_init__(self) -> None:
        if self.motion not in MOTIONS:
            raise ValueError(f"motion={self.motion!r} is not known; choose {' or '.join(MOTIONS)}")
        for name in ("reference", "process", "measurement"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}; give a value above 0, such as 1")
        if self.theta is not None:
            check_number("theta", self.theta, example=0.9)
        if self.delta is not None:
            check_number("delta", self.delta, 0, example=0.5)

    @classmethod
    def load(cls, folder: str | Path) -> ActionConstants:
        """From a folder, or the file in it. Raises ValueError for anything else."""
        path = Path(folder)
        path = path / FILE if path.is_dir() else path
        try:
            check_is_file(path)
            found: Any = json.loads(path.read_text(encoding="utf-8"))
            values = found["constants"]
            unknown = sorted(set(values) - {one.name for one in fields(cls)})
            if unknown:
                raise ValueError(f"{', '.join(unknown)} are not known")
            return cls(**values)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{folder} holds no constants of actions ({error}); give a folder with {FILE}, as "
                "`mmspec train constants` writes it"
            ) from error

    def save(self, folder: str | Path, **report: Any) -> Path:
        """Write the file into a folder, with a report of how they were found; returns its path."""
        path = Path(folder) / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {"constants": asdict(self), **report}
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        return path
