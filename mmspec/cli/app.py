"""All commands and their options. The modules that run them are imported when they are called."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from mmspec import __version__
from mmspec.cli import (
    export,
    planning_commands,
    recipes,
    results_command,
    schedule_commands,
    train_commands,
    zoo,
)
from mmspec.cli.options import (
    PARTS,
    PLACED,
    Count,
    Prompts,
    Repeats,
    Seed,
    Threads,
    flag,
    model_command,
    placed_command,
    refuse_repeated,
    run_function,
)
from mmspec.cli.output import Json

Modality = Annotated[str | None, typer.Option(help="If a model has several.")]
BatchSize = Annotated[int, typer.Option(min=1, max=4096, help="Prompts, or robots, per batch.")]
Csv = Annotated[Path | None, typer.Option(help="Write the points as CSV.")]
Plot = Annotated[Path | None, typer.Option(help="Plot them, as SVG or PNG; needs matplotlib.")]

app = typer.Typer(
    name="mmspec",
    help="Speculative decoding for multimodal Hugging Face models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
measure = typer.Typer(help="Measure speed-ups, efficiency and growth.")


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    """Speculative decoding for multimodal Hugging Face models."""
    if version:
        typer.echo(__version__)


@app.command("generate")
@model_command("mmspec.cli.generate:run", "generate")
def generate(
    prompt: Annotated[
        str, typer.Option(help="A question or a description; optional for audio.")
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(help="File to write; default: mmspec.png for images. - is stdout (--stream)."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write every round, as a page (.html) or as data (.jsonl).")
    ] = None,
    compare: Annotated[
        bool | None,
        typer.Option(help="Also measure the library's own generate(); on unless --stream."),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, max=10_000, help="Number of measurements to compare; default: 5."),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print the text at its end, without colours.")
    ] = False,
    stream: Annotated[
        bool, typer.Option("--stream", help="Write verified text or speech at once; no --compare.")
    ] = False,
) -> None:
    """Generate text, images, speech or actions, and report the speed-up."""


@app.command("demo")
def demo(
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 7860,
    threads: Threads = None,
) -> None:
    """Try recipes in a browser, a trace beside every answer; needs the extra `demo`."""
    run_function("mmspec.cli.demo:run", host, port, threads)


@app.command("trace")
def trace(
    file: Annotated[Path, typer.Argument(help="What `mmspec generate --trace FILE.jsonl` wrote.")],
    out: Annotated[Path | None, typer.Option(help="The page to write; default: FILE.html.")] = None,
    json: Json = False,
) -> None:
    """Make a page of a saved trace: the rounds of a request, to look at in a browser."""
    run_function("mmspec.cli.trace:make_page", file, out, json)


@app.command("doctor")
@placed_command(*PLACED)
def doctor(
    target: Annotated[
        str | None, typer.Argument(help="A folder, a hub name or zoo:NAME.", show_default=False)
    ] = None,
    drafter: Annotated[str | None, typer.Argument(help="A draft model or head for it.")] = None,
    every: Annotated[
        bool,
        typer.Option("--all", help="Measure every class of the installed transformers, diffusers."),
    ] = False,
    modality: Modality = None,
    json: Json = False,
    placed: Any = None,
) -> None:
    """Check a model, or a pair, before loading any weights. Exit code 1 if it is refused."""
    if every == (target is not None):
        raise typer.BadParameter("give either a model or --all")
    if every and placed:
        raise typer.BadParameter(f"--all measures every class; drop {', '.join(map(flag, placed))}")
    if every:
        run_function("mmspec.cli.doctor:survey", modality, json)
    else:
        run_function("mmspec.cli.doctor:run", target, drafter, modality, json, placed)


@app.command("compressors")
def compressors(json: Json = False) -> None:
    """List the compressors: parameters, what each needs, how many visual tokens it keeps."""
    run_function("mmspec.cli.studies:list_compressors", json)


@app.command("certify")
@model_command(
    "mmspec.cli.certify:run", "certify", without=("recipe", "seed", "verifier", "overrides", *PARTS)
)
def certify(
    recipe: Annotated[str, typer.Argument(help="One of `mmspec recipes`.")],
    prompts: Annotated[
        int, typer.Option(min=1, max=100_000, help="Prompts for greedy equality.")
    ] = 20,
    seeds: Annotated[
        int, typer.Option(min=1, max=100_000, help="Seeds for sampled equality.")
    ] = 50,
    samples: Annotated[
        int, typer.Option(min=500, max=10**7, help="Samples per frequency test.")
    ] = 6000,
    seed: Annotated[
        int,
        typer.Option(min=0, max=2**63 - 1, help="Selects the prompts; samples use seeds 0, 1, ..."),
    ] = 0,
) -> None:
    """Test whether a recipe is exact. Exit code 1 if its claim is refuted."""


@measure.callback(invoke_without_command=True)
@model_command("mmspec.cli.bench:run", "bench", alone={"growth": ("repeats", "threads", "json")})
def bench(
    context: typer.Context,
    prompt: Prompts = None,
    prompts: Count = 16,
    batch: BatchSize = 1,
    repeats: Repeats = 5,
    peers: Annotated[
        bool, typer.Option(help="Measure the library's own speculative decoding.")
    ] = True,
    controls: Annotated[bool, typer.Option(help="Measure drafters without information.")] = False,
    efficiency: Annotated[bool, typer.Option(help="Also measure the forwards alone.")] = True,
    growth: Annotated[
        bool, typer.Option("--growth", help="Host time per round at 512 and 4096 tokens.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write the recipes, fastest first, as CSV or Markdown.")
    ] = None,
    plot: Plot = None,
) -> None:
    """Compare recipes with the library's generate() and its peers: one process, same prompts.

    --recipe may be repeated, or be `all`: every recipe that fits and has weights, ranked; published
    trees run once more with `--tree auto`. --plot shows speed-up and acceptance length.
    """


@measure.command("sweep")
@model_command("mmspec.cli.studies:sweep", "bench", without=PARTS)
def sweep(
    prompt: Prompts = None,
    prompts: Count = 8,
    batch: BatchSize = 1,
    repeats: Repeats = 3,
    out: Csv = None,
    plot: Plot = None,
) -> None:
    """Vary the options of lossy recipes: calls saved, quality, distance from the target.

    Image tokens (default: zoo:image), or `--modality diffusion`, beside fewer steps.
    """


@measure.command("trees")
@model_command(
    "mmspec.cli.studies:compare_trees", "bench", without=("recipe", "verifier", "overrides", *PARTS)
)
def trees(
    prompt: Prompts = None,
    prompts: Count = 8,
    nodes: Annotated[
        list[int] | None, typer.Option(min=1, max=256, help="Nodes of a tree; repeatable.")
    ] = None,
    depth: Annotated[int, typer.Option(min=1, max=64, help="Levels of a tree at most.")] = 8,
) -> None:
    """Tree shapes at equal numbers of nodes: tokens per call, predicted and measured."""


@measure.command("compressors")
@model_command(
    "mmspec.cli.studies:compare_compressors",
    "bench",
    without=("compressor", "kv", "window", "max_rows"),
)
def compare_compressors(
    prompt: Prompts = None,
    prompts: Count = 8,
    repeats: Repeats = 3,
    only: Annotated[
        list[str] | None, typer.Option(help="NAME or NAME:keep=0.25; repeatable; default: all.")
    ] = None,
    out: Csv = None,
    plot: Plot = None,
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw the tokens that each keeps, over the frames of a clip."),
    ] = None,
) -> None:
    """Compare compressors on one pair: kept tokens, acceptance, prefill of the drafter, speed."""


@measure.command("views")
def views(
    shape: Annotated[str, typer.Option(help="A decoder, of `bench scale --shape list`.")] = "small",
    visual: Annotated[
        list[int] | None, typer.Option(max=1 << 20, help="Visual tokens; repeatable.")
    ] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(help="How many of them a draft reads; repeatable.")
    ] = None,
    length: Annotated[int, typer.Option(min=1, max=1024, help="Drafted tokens per round.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, max=10_000, help="Rounds per context.")] = 8,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    seed: Seed = 0,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Draft on part of the target's cache (StD): time per round as visual contexts grow."""
    sizes: dict[str, Any] = {"length": length, "rounds": rounds, "device": device, "seed": seed}
    run_function("mmspec.cli.studies:views", shape, visual, tokens, threads, json, **sizes)


@measure.command("rules")
def rules(
    vocabulary: Annotated[int, typer.Option(min=2, max=10, help="Tokens.")] = 6,
    siblings: Annotated[
        list[int] | None, typer.Option(min=1, max=4, help="Drafts per token; repeatable.")
    ] = None,
    pairs: Annotated[int, typer.Option(min=1, max=10_000, help="Pairs of distributions.")] = 20,
    noise: Annotated[
        float, typer.Option(min=0, max=10, help="Deviation of the drafter's scores.")
    ] = 1.0,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Rules for several drafts of one token: acceptance beside the optimum, by enumeration."""
    given = (vocabulary, siblings, pairs, noise, seed, json)
    run_function("mmspec.cli.studies:compare_rules", *given)


@measure.command("scale")
def scale(
    shape: Annotated[str, typer.Option(help="A published shape; `--shape list` names them.")],
    context: Annotated[list[int] | None, typer.Option(max=1 << 20, help="Prompt lengths.")] = None,
    acceptance: Annotated[
        list[float] | None, typer.Option(help="Probabilities that a drafted token is accepted.")
    ] = None,
    length: Annotated[int, typer.Option(min=1, max=1024, help="Drafted tokens per round.")] = 5,
    max_new_tokens: Annotated[int, typer.Option(min=8, max=1 << 16)] = 128,
    batch: Annotated[int, typer.Option(min=1, max=4096)] = 1,
    tree: Annotated[
        list[int] | None,
        typer.Option(min=1, max=64, help="Widths of a tree to measure, too; repeatable."),
    ] = None,
    compile: Annotated[bool, typer.Option(help="Measure every row compiled, too.")] = False,
    repeats: Repeats = 3,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, ...; default: the fastest.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16.")] = None,
    seed: Seed = 0,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Engine efficiency at a published size, with an oracle drafter, beside the memory's limit."""
    sizes: dict[str, Any] = {"length": length, "batch": batch, "repeats": repeats, "seed": seed}
    sizes |= {"device": device, "dtype": dtype, "compile": compile}
    given = (shape, context, acceptance, tree, threads, max_new_tokens, json)
    run_function("mmspec.cli.scale:scale", *given, **sizes)


@measure.command("serve")
@model_command("mmspec.cli.serving:measure_serving", "bench")
def bench_serve(
    prompt: Prompts = None,
    prompts: Count = 64,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, max=4096, help="Clients at once; repeatable.")
    ] = None,
    rate_hz: Annotated[
        list[float] | None,
        typer.Option("--rate", min=1e-3, help="Requests a second at random times; repeatable."),
    ] = None,
    ragged: Annotated[
        bool, typer.Option("--ragged", help="Outputs of different lengths, without an early end.")
    ] = False,
) -> None:
    """Many requests at once: tokens per second and latency of the engine and its baselines."""


@app.command("convert")
def convert(
    layout: Annotated[
        str | None, typer.Argument(metavar="[FORMAT]", help="Default: list all.")
    ] = None,
    files: Annotated[list[Path] | None, typer.Argument(help="The published files.")] = None,
    out: Annotated[Path | None, typer.Option(help="A new folder, of safetensors.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE that no file holds; repeatable.")
    ] = None,
    json: Json = False,
) -> None:
    """Convert published weights into a folder that loads here; code in pickles is never run."""
    run_function("mmspec.cli.formats:convert", layout, files or [], out, overrides, json)


@app.command("serve")
@model_command("mmspec.cli.serve:run", "serve", without=("model", "seed", "json"), settings=False)
def serve(
    model: Annotated[str, typer.Argument(help="A folder, a hub name or zoo:NAME.")],
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    token: Annotated[
        str | None, typer.Option(envvar="MMSPEC_TOKEN", help="Bearer token that clients send.")
    ] = None,
    max_requests: Annotated[int, typer.Option(min=1, help="Requests decoded at a time.")] = 8,
    max_slots: Annotated[
        int | None, typer.Option(min=1, help="Tokens of all of them: prompts, outputs, drafts.")
    ] = None,
    max_queue: Annotated[int, typer.Option(min=0, help="Requests that may wait.")] = 64,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Default of requests.")] = 512,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Seconds of one request, waiting included.")
    ] = 600,
    allow_urls: Annotated[
        bool, typer.Option("--allow-urls", help="Read images from network addresses.")
    ] = False,
    replicas: Annotated[
        int, typer.Option(min=1, help="Copies of the model behind the address, by Ray Serve.")
    ] = 1,
) -> None:
    """Serve a model over an OpenAI-compatible API; needs the extra `serve`."""


app.command("recipes")(recipes.recipes)
app.command("show")(recipes.show)
measure.command("results")(results_command.results)
measure.command("overlap")(schedule_commands.overlap)
measure.command("schedules")(schedule_commands.schedules)
measure.command("plan")(planning_commands.plan)
measure.command("simulate")(planning_commands.simulate)
measure.command("calibrate")(planning_commands.calibrate)
measure.command("ray")(planning_commands.measure_workers)
app.add_typer(measure, name="bench")
app.add_typer(train_commands.app, name="train")
app.add_typer(export.app, name="export")
app.add_typer(zoo.app, name="zoo")


@cache
def commands() -> Any:
    """The tree of all commands, built once."""
    made: Any = typer.main.get_command(app)
    refuse_repeated(made)
    return made
