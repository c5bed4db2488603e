"""Measurements on disk: one JSON file per job, found again by the settings it was measured with."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from mmspec import recipes, zoo
from mmspec.bench.compare import Comparison
from mmspec.bench.results.systems import Job
from mmspec.bench.row import Row
from mmspec.errors import parse_json
from mmspec.registry import ZOO

FAILED = ".failed"


@dataclass(frozen=True)
class Effort:
    """How much is measured; the same for all jobs."""

    prompts: int = 4
    repeats: int = 2
    threads: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Record:
    """What a job measured, and the reasons of what it could not."""

    settings: Mapping[str, Any]
    rows: tuple[Row, ...]  # plain decoding, then the recipes
    baselines: tuple[Row, ...]  # and controls
    left_out: Mapping[str, str]
    environment: Mapping[str, Any]
    requests: int
    judged: int
    seconds: float  # of the processor

    @classmethod
    def of(
        cls, settings: Mapping[str, Any], found: Comparison, why: Mapping[str, str], seconds: float
    ) -> Record:
        """The record of a comparison."""
        beside = (*found.baselines, *found.controls)
        made = (tuple(found.rows), beside, dict(why), dict(found.environment))
        return cls(settings, *made, found.requests, found.judged, seconds)


def describe(job: Job, effort: Effort) -> dict[str, Any]:
    """Everything that a measurement depends on but the code: the key of its record."""
    drafters = {name: zoo.drafter_for(job.model, recipes.get(name)) for name in job.recipes}
    small = () if job.system is None else job.system.small
    models = [job.model, *filter(None, dict.fromkeys(drafters.values())), *small]
    if small:
        drafters[job.name] = ", ".join(small)
    return {
        "job": job.name,
        "model": job.model,
        "recipes": [*job.recipes],
        "drafters": drafters,
        "settings": dict(job.settings),
        **({"options": dict(job.options)} if job.options else {}),
        "peers": job.peers,
        **asdict(effort),
        "prompts": job.count_requests(effort.prompts),
        "weights": {name: _digest(name) for name in models},
    }


@cache
def _digest(model: str) -> str:
    """A hash of the weights of a model."""
    folder = zoo.path(model) if model.startswith(ZOO) else Path(model)
    found = hashlib.sha256()
    for file in sorted(folder.rglob("*.safetensors")):
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


class Store:
    """Records in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, settings: Mapping[str, Any]) -> Record | None:
        """The record of these settings; None where it is not measured."""
        file = self._file(settings)
        return read_record(parse_json(file.read_bytes())) if file.exists() else None

    def write(self, record: Record) -> None:
        """Write a record, whole or not at all."""
        file = self._file(record.settings)
        self._put(file, json.dumps(asdict(record), indent=1, default=str))
        file.with_suffix(FAILED).unlink(missing_ok=True)

    def write_failure(self, settings: Mapping[str, Any], why: str) -> None:
        """Write why a job could not run; it counts as not measured."""
        self._put(self._file(settings).with_suffix(FAILED), why)

    def find_failure(self, settings: Mapping[str, Any]) -> str | None:
        """Why a job could not run, if it was tried."""
        file = self._file(settings).with_suffix(FAILED)
        return file.read_text(encoding="utf-8") if file.exists() else None

    def _put(self, file: Path, text: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_text(text, encoding="utf-8")
        part.replace(file)

    def _file(self, settings: Mapping[str, Any]) -> Path:
        text = json.dumps(settings, sort_keys=True, default=str)
        name = re.sub(r"[^a-z0-9]+", "-", str(settings["job"]).lower()).strip("-")
        return self.folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"


def read_record(data: Mapping[str, Any]) -> Record:
    """A record from plain data; columns of other versions are dropped."""
    rows = {name: tuple(map(_read_row, data[name])) for name in ("rows", "baselines")}
    return Record(**{**data, **rows})


def _read_row(data: Mapping[str, Any]) -> Row:
    known = {one.name for one in fields(Row)}
    return Row(**{name: value for name, value in data.items() if name in known})
