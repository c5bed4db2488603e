"""Run `mmspec bench plan | simulate | calibrate`, and print their tables."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from mmspec.bench.planning import calibration
from mmspec.bench.planning.costs import Decoding
from mmspec.bench.planning.devices import Device, find_device
from mmspec.bench.planning.plan import make_decoding, make_plan
from mmspec.bench.planning.simulation import Simulation, Stream
from mmspec.cli.models import set_threads
from mmspec.cli.output import (
    console,
    format_percent,
    format_ratio,
    print_json,
    print_table,
    show_progress,
    silence_libraries,
)
from mmspec.errors import parse_json
from mmspec.serving.scheduler import Limits

LEAST = 200  # simulated requests
RATES = (10.0, 100.0, 1000.0, 10_000.0)


def plan(
    shape: str,
    device: str,
    devices: list[int] | None,
    context: list[int] | None,
    acceptance: list[float] | None,
    output: int,
    json: bool,
) -> None:
    """Predicted speeds by goal, number of devices, context and acceptance."""
    found = make_plan(
        shape,
        read_device(device),
        devices=devices or (1, 8, 64),
        contexts=context or (2048, 32768, 131072),
        acceptances=acceptance or (0.6, 0.9),
        output=output,
    )
    if json:
        print_json(found.to_dict())
        return
    rows = [
        (
            one.goal,
            one.devices,
            one.context,
            one.acceptance,
            f"{one.replicas} x {one.tensor}",
            one.rows,
            one.length,
            f"{one.tokens_per_second:,.0f}",
            one.ms_per_token,
            one.first_token_ms,
            format_ratio(one.speedup),
            one.pays_up_to,
        )
        for one in sorted(found.points, key=lambda one: (one.goal, one.devices))
    ]
    titles = ("goal", "devices", "context", "acceptance", "replicas x split", "rows", "drafted")
    more = ("tokens/s", "ms/token", "first token ms", "over plain", "pays up to rows")
    heading = f"{shape} on {found.device.name}, {output} output tokens, predicted"
    print_table(rows, *titles, *more, heading=heading)
    for reason in found.skipped:
        console().print(reason, style="dim", markup=False)


def simulate(
    shape: str,
    device: str,
    devices: int,
    tensor: int,
    rate: list[float] | None,
    json: bool,
    **given: Any,
) -> None:
    """Simulated latencies of streams of several rates, and the first bottleneck of each."""
    if devices % tensor:
        raise ValueError(
            f"--devices {devices} is no multiple of --tensor {tensor}; give replicas of equal size"
        )
    decoding = make_decoding(shape, read_device(device), tensor)
    decoding = decoding if given["length"] else Decoding(decoding.target)
    limits = Limits(given["max_rows"], _find_slots(decoding, given), given["max_queue"])
    replicas, outcomes = devices // tensor, []
    for one in rate or RATES:
        sizes = {name: given[name] for name in ("prompt", "output", "seed")}
        sizes["requests"] = max(round(one / replicas * given["seconds"]), LEAST)
        run = Simulation(decoding, limits, given["length"], given["acceptance"], given["seed"])
        outcomes.append((one, run.run(Stream(one / replicas, **sizes))))
    if json:
        print_json([{**dataclasses.asdict(found), "rate": one} for one, found in outcomes])
        return
    rows = [
        (
            f"{one:,g}",
            f"{replicas * found.tokens_per_second:,.0f}",
            found.p50_seconds,
            found.p99_seconds,
            found.p50_first_token,
            found.rows_per_round,
            format_percent(found.utilisation),
            format_percent(found.refused / (found.refused + found.completed)),
            found.limit,
            found.bottleneck,
        )
        for one, found in outcomes
    ]
    titles = ("requests/s", "tokens/s", "p50 s", "p99 s", "first token p50 s", "rows/round")
    heading = f"{shape} on {replicas} x {tensor} {decoding.target.device.name}, simulated"
    print_table(rows, *titles, "busy", "refused", "waits for", "bottleneck", heading=heading)


def _find_slots(decoding: Decoding, given: dict[str, Any]) -> int:
    """The slots that the memory has. Raises ValueError where it does not hold one request."""
    slots = decoding.max_slots
    mean = given["prompt"] + given["output"]
    if slots < 2 * mean:
        device = decoding.target.device
        raise ValueError(
            f"{decoding.target.devices} x {device.name} hold {slots} tokens beside the weights, "
            f"which is less than two requests of {mean}; give more in --tensor, or shorter ones"
        )
    return slots


def calibrate(repeats: int, threads: int | None, json: bool) -> None:
    """Constants fitted to this processor, and errors on what they were not fitted to."""
    silence_libraries()
    set_threads(threads or 1)
    with show_progress(json) as report:
        found = calibration.calibrate(repeats, report)
    if json:
        print_json(found.to_dict())
        return
    for title, samples, errors in (
        ("fitted to", found.fitted, found.fitted_errors),
        ("not fitted to", found.held_out, found.held_out_errors),
    ):
        rows = [
            (one.shape, one.rows, one.tokens, one.context, 1e3 * one.seconds, f"{error:+.0%}")
            for one, error in zip(samples, errors, strict=True)
        ]
        middle, largest = calibration.summarise(errors)
        heading = f"{title}: error {middle:.0%} in the median, at most {largest:.0%}"
        columns = ("shape", "rows", "tokens", "context", "measured ms", "error")
        print_table(rows, *columns, heading=heading)
    one, where = found.device, found.environment
    console().print(
        f"{one.flops / 1e9:.1f} GFLOP/s, {one.bandwidth / 1e9:.1f} GB/s, "
        f"{1e6 * one.layer_seconds:.0f} us per layer; the host takes {1e3 * one.round_seconds:.2f} "
        f"ms per round and {1e3 * one.row_seconds:.2f} ms per row of it; {where['device']}, "
        f"{where['threads']} threads",
        markup=False,
    )


def read_device(name: str) -> Device:
    """A device by name, or of a file that `bench calibrate --json` printed. Raises ValueError."""
    if not name.endswith(".json"):
        return find_device(name)
    try:
        content = parse_json(Path(name).read_text(encoding="utf-8"))
        return Device(**content["device"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--device {name} cannot be read ({error}); give the output of `mmspec bench "
            "calibrate --json`"
        ) from None
