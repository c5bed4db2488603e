"""Plans: what is best, where drafting stops to pay, what does not fit; and the commands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmspec.bench.planning.devices import H100
from mmspec.bench.planning.plan import (
    LATENCY,
    THROUGHPUT,
    best_length,
    find_break_even,
    make_decoding,
    make_plan,
)
from mmspec.cli import planning

SHAPE = "qwen2.5-vl-7b"
DECODING = make_decoding(SHAPE, replace(H100, round_seconds=0.0, row_seconds=0.0))


def test_more_is_drafted_where_more_is_accepted() -> None:
    lengths = [best_length(DECODING, 1, 1024, rate) for rate in (0.0, 0.3, 0.6, 0.9)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 0 < lengths[1] < lengths[-1]


def test_drafts_stop_to_pay_once_verification_is_arithmetic() -> None:
    """Weights are read once for all rows; with short contexts rows compete for arithmetic."""
    most = find_break_even(DECODING, 64, 0.6, 1 << 14)
    assert 16 < most < 1 << 14
    assert not DECODING.is_compute_bound(1, 4)
    assert DECODING.is_compute_bound(2 * most, 4)
    assert find_break_even(DECODING, 64, 0.9, 1 << 14) >= most
    assert find_break_even(DECODING, 32768, 0.6, 1 << 14) > most  # caches are read once per draft


def test_throughput_grows_with_replicas_and_latency_shrinks_with_a_split() -> None:
    found = make_plan(SHAPE, H100, devices=(1, 4, 8), contexts=(2048,), acceptances=(0.8,))
    fast = {one.devices: one for one in found.points if one.goal == LATENCY}
    wide = {one.devices: one for one in found.points if one.goal == THROUGHPUT}
    assert wide[8].tokens_per_second >= 2 * wide[4].tokens_per_second * 0.999
    assert wide[4].tokens_per_second >= 4 * wide[1].tokens_per_second * 0.999
    assert fast[1].ms_per_token > fast[4].ms_per_token
    assert fast[4].tensor == fast[8].tensor == 4  # four key-value heads
    assert all(one.speedup > 1 for one in found.points)


def test_what_does_not_fit_is_said() -> None:
    found = make_plan("qwen2.5-vl-72b", H100, devices=(1, 8), contexts=(2048,))
    assert found.skipped == ("1 h100 do not hold the weights and one request of 2304 tokens",)
    assert {one.devices for one in found.points} == {8}


def test_wrong_values_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown shape 'x'; known shapes: llava"):
        make_plan("x", H100)
    with pytest.raises(ValueError, match=r"acceptance=1.5 must be"):
        make_plan(SHAPE, H100, acceptances=(1.5,))


def test_commands_print_tables_and_json(capsys: Any, tmp_path: Path) -> None:
    planning.plan(SHAPE, "h100", [1], [2048], [0.8], 256, True)
    plan = json.loads(capsys.readouterr().out)
    assert len(plan["points"]) == 2
    given = {"prompt": 256, "output": 32, "acceptance": 0.8, "length": 3}
    given |= {"max_rows": 8, "max_queue": 8, "seconds": 1.0, "seed": 0}
    file = tmp_path / "device.json"
    file.write_text(json.dumps(plan), encoding="utf-8")  # has a device, as a calibration
    planning.simulate(SHAPE, str(file), 8, 4, [1.0], False, **given)
    assert "2 x 4 h100" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--devices 8 is no multiple of --tensor 3"):
        planning.simulate(SHAPE, "h100", 8, 3, None, False, **given)
    with pytest.raises(ValueError, match="1 x h100 hold 0 tokens beside the weights"):
        planning.simulate("qwen2.5-vl-72b", "h100", 8, 1, None, False, **given)
    with pytest.raises(ValueError, match="cannot be read"):
        planning.read_device(str(tmp_path / "none.json"))
