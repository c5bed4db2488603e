"""`mmspec bench serve`: an engine beside its baselines."""

from __future__ import annotations

from mmspec.bench.studies import serving as serving_study
from mmspec.cli.bench import workload
from mmspec.cli.models import load, select
from mmspec.cli.options import ModelOptions
from mmspec.cli.output import console, format_percent, print_json, print_table, show_progress


def measure_serving(
    options: ModelOptions,
    prompt: list[str] | None,
    prompts: int,
    concurrency: list[int] | None,
    rate_hz: list[float] | None,
    ragged: bool,
) -> None:
    """An engine beside one request at a time, static batches, and `generate_batch`."""
    loaded = load(options, select(options))
    static = min(serving_study.STATIC, prompts)
    work, batched = (workload(loaded, prompt, prompts, size, options.seed) for size in (1, static))
    with show_progress(options.json) as report:
        found = serving_study.measure_serving(
            loaded.accelerate(loaded.selection.recipe),
            work.timed,
            batched.timed,
            model=loaded.selection.model,
            concurrencies=concurrency or (() if rate_hz else serving_study.CONCURRENCIES),
            rates_hz=rate_hz or (),
            ragged=ragged,
            seed=options.seed,
            progress=report,
        )
    if options.json:
        print_json(found.to_dict())
        return
    rows = [
        (
            one.concurrency if one.rate_hz is None else f"{one.rate_hz:g}/s",
            one.method,
            one.tokens_per_second,
            one.percentile(50),
            one.percentile(99),
            one.first_token_percentile(50),
            one.rows_per_round,
            one.rejected,
            None if one.identical is None else format_percent(one.identical),
        )
        for one in found.points
    ]
    titles = (
        "clients",
        "method",
        "tokens/s",
        "p50 s",
        "p99 s",
        "first p50 s",
        "rows/round",
        "rejected/request",
        "as alone",
    )
    heading = f"{found.model} with {found.recipe}, {found.requests} requests"
    print_table(rows, *titles, heading=heading)
    for method, reason in found.skipped.items():
        console().print(f"\n{method}: {reason}", style="dim")
