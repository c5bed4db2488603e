"""Several workers over one: only what ran at the same time counts; both methods answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mmspec.bench.studies.workers import count_together
from mmspec.cli import workers


def row(worker: int, begun: float, ended: float, tokens: int = 10) -> dict[str, Any]:
    return {"worker": worker, "begun": begun, "ended": ended, "num_tokens": tokens}


def test_only_batches_beside_all_workers_count() -> None:
    alone = row(1, 0, 2, tokens=99)  # before the second worker has begun
    both = [row(1, 2, 4), row(2, 2, 4), row(1, 4, 6), row(2, 4, 7, tokens=99)]
    found = count_together([alone, *both], 2)
    assert (found.tokens, found.seconds) == (30, 4.0)
    with pytest.raises(ValueError, match="2 rows are too few for 2 workers"):
        count_together([row(1, 0, 1), row(2, 2, 3)], 2)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_both_methods_answer(capsys: Any) -> None:
    pytest.importorskip("ray.serve")
    workers.run("zoo:llava", "coupled", "zoo:llava-drafter", [1], 8, True)
    data, serve = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (data["method"], data["tokens"]) == ("Ray Data", 8 * 64)
    assert (serve["method"], serve["tokens"]) == ("Ray Serve", 8 * 64)
