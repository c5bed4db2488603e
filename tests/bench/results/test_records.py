"""Records: found by the settings they were measured with, and by nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mmspec.bench.results.records import Effort, Record, Store, describe
from mmspec.bench.results.systems import plan, select
from mmspec.bench.row import Row

(JOB,) = select(plan(), None, ["ctc-ssd"])
SETTINGS = describe(JOB, Effort())
RECORD = Record(
    SETTINGS, (Row("plain"), Row("ctc-ssd", spread={"a": [1.0, 2.0]})), (), {}, {}, 4, 4, 1.5
)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    store = Store(tmp_path / "rows")
    assert store.find(SETTINGS) is None
    store.write_failure(SETTINGS, "no weights")
    assert (store.find(SETTINGS), store.find_failure(SETTINGS)) == (None, "no weights")
    store.write(RECORD)
    assert (store.find(SETTINGS), store.find_failure(SETTINGS)) == (RECORD, None)
    assert len([*store.folder.iterdir()]) == 1


@pytest.mark.parametrize(
    "other",
    [Effort(prompts=5), Effort(repeats=3), Effort(threads=2), Effort(seed=1)],
    ids=("prompts", "repeats", "threads", "seed"),
)
def test_other_settings_are_other_records(tmp_path: Path, other: Effort) -> None:
    store = Store(tmp_path)
    store.write(RECORD)
    assert store.find(describe(JOB, other)) is None
    assert store.find(describe(replace(JOB, settings={"temperature": 1.0}), Effort())) is None


def test_other_weights_are_another_record() -> None:
    (name,) = SETTINGS["weights"]
    assert name == JOB.model == "zoo:granite-speech"
    assert len(SETTINGS["weights"][name]) == 16
