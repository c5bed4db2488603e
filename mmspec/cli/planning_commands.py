"""`mmspec bench plan | simulate | calibrate | ray`: their options; nothing here imports torch."""

from __future__ import annotations

from typing import Annotated

import typer

from mmspec.cli.options import Threads, run_function
from mmspec.cli.output import Json

Shape = Annotated[str, typer.Option(help="A decoder, of `bench scale --shape list`.")]
Device = Annotated[
    str, typer.Option(help="h100, a100, or a file of `bench calibrate --json` (JSON).")
]
Output = Annotated[int, typer.Option(min=1, max=1 << 20, help="Output tokens of a request.")]


def plan(
    shape: Shape,
    device: Device = "h100",
    devices: Annotated[
        list[int] | None, typer.Option(min=1, max=1 << 16, help="Numbers of devices; repeatable.")
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(min=1, max=1 << 24, help="Prompt lengths in tokens; repeatable."),
    ] = None,
    acceptance: Annotated[
        list[float] | None,
        typer.Option(
            min=0, max=1, help="Probabilities that a drafted token is accepted; repeatable."
        ),
    ] = None,
    output: Output = 256,
    json: Json = False,
) -> None:
    """Predict the speed of a published shape on many devices, by a cost model."""
    run_function(
        "mmspec.cli.planning:plan", shape, device, devices, context, acceptance, output, json
    )


def simulate(
    shape: Shape,
    device: Device = "h100",
    devices: Annotated[int, typer.Option(min=1, max=1 << 16, help="Number of devices.")] = 1,
    tensor: Annotated[int, typer.Option(min=1, help="Devices per copy of the target.")] = 1,
    rate: Annotated[
        list[float] | None, typer.Option(help="Requests per second; repeatable.")
    ] = None,
    prompt: Annotated[
        int,
        typer.Option("--prompt-tokens", min=1, max=1 << 24, help="Mean prompt length in tokens."),
    ] = 1024,
    output: Output = 256,
    acceptance: Annotated[
        float,
        typer.Option(min=0, max=1, help="Probability that a drafted token is accepted."),
    ] = 0.8,
    length: Annotated[int, typer.Option(min=0, max=64, help="Drafted tokens per round.")] = 3,
    max_rows: Annotated[int, typer.Option(min=1, help="Requests decoded at a time.")] = 64,
    max_queue: Annotated[int, typer.Option(min=0, help="Requests that may wait.")] = 64,
    seconds: Annotated[
        float, typer.Option(min=1, max=1e6, help="Duration of arrivals; at least 200 requests.")
    ] = 60,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    json: Json = False,
) -> None:
    """Simulate streams of requests with the engine's own scheduler, and name the bottleneck."""
    run_function(
        "mmspec.cli.planning:simulate",
        shape,
        device,
        devices,
        tensor,
        rate,
        json,
        prompt=prompt,
        output=output,
        acceptance=acceptance,
        length=length,
        max_rows=max_rows,
        max_queue=max_queue,
        seconds=seconds,
        seed=seed,
    )


def calibrate(
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="Number of measurements.")] = 3,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Fit the cost model to forwards on this processor, and check it on others."""
    run_function("mmspec.cli.planning:calibrate", repeats, threads, json)


def measure_workers(
    model: Annotated[str, typer.Option(help="A folder, a hub name or zoo:NAME.")] = "zoo:llava",
    recipe: Annotated[str, typer.Option(help="One of `mmspec recipes`.")] = "coupled",
    drafter: Annotated[str | None, typer.Option(help="Draft model, if the recipe has one.")] = (
        "zoo:llava-drafter"
    ),
    workers: Annotated[list[int] | None, typer.Option(min=1, help="Numbers; repeatable.")] = None,
    prompts: Annotated[int, typer.Option(min=8, max=100_000, help="Prompts per worker.")] = 64,
    json: Json = False,
) -> None:
    """Measure several workers over one, by Ray Data and by Ray Serve; needs the extra `ray`."""
    run_function("mmspec.cli.workers:run", model, recipe, drafter, workers or [1, 2], prompts, json)
