"""`mmspec train`: commands that train on the outputs of a model, and their options."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from mmspec.cli.options import (
    IMAGE_MODEL,
    PARTS,
    PLACEMENT,
    DefaultGroup,
    Seed,
    Threads,
    model_command,
    placed_command,
    run_function,
)
from mmspec.cli.output import Json

Answers = StrEnum("Answers", ["target", "data"])
Tracker = StrEnum("Tracker", ["tensorboard", "wandb"])
VisualSlots = StrEnum("VisualSlots", ["placeholder", "fused", "hidden"])

app = typer.Typer(
    help="Train on the outputs of a model: `mmspec train RECIPE` trains its head.",
    no_args_is_help=True,
    cls=DefaultGroup,
)


@app.command("recipe")
@placed_command(*PLACEMENT)
def train(
    recipe: Annotated[
        str, typer.Argument(help="A recipe whose drafter can be trained, such as eagle-2.")
    ],
    target: Annotated[str, typer.Option(help="The target: a folder, a hub name or zoo:NAME.")],
    data: Annotated[
        Path,
        typer.Option(
            help="A .jsonl, .json or .parquet file, a folder, or episodes of a policy: table:64."
        ),
    ],
    out: Annotated[Path, typer.Option(help="A new folder, or one of a run to resume.")],
    images: Annotated[
        Path | None, typer.Option(help="Folder of the images; default: that of the data.")
    ] = None,
    image_root: Annotated[
        list[Path] | None,
        typer.Option(help="Another folder that images, or links to them, may lie in; repeatable."),
    ] = None,
    allow_urls: Annotated[
        bool, typer.Option("--allow-urls", help="Download images that the data name by address.")
    ] = False,
    max_bad_rows: Annotated[
        int, typer.Option(min=0, help="Rows that may be left out because they cannot be used.")
    ] = 0,
    answers: Annotated[
        Answers, typer.Option(help="Train on the target's answers, or on those of the data.")
    ] = Answers.target,
    endpoint: Annotated[
        str | None,
        typer.Option(help="Target that answers elsewhere, OpenAI-compatible: http://HOST:8000/v1."),
    ] = None,
    endpoint_model: Annotated[
        str | None, typer.Option(help="Its name there; default: the only one.")
    ] = None,
    endpoint_timeout: Annotated[
        float, typer.Option(min=0.01, help="Seconds for one of its answers.")
    ] = 300.0,
    concurrency: Annotated[
        int, typer.Option(min=1, max=4096, help="Requests to it at once, of each process.")
    ] = 8,
    head: Annotated[
        Path | None,
        typer.Option("--head", "--drafter", help="A head, or a small model, to start from."),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="A new folder to cache the target's states in.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=10**8)] = 2000,
    batch: Annotated[int, typer.Option(min=1, max=4096, help="Questions per batch.")] = 8,
    accumulate: Annotated[int, typer.Option(min=1, max=4096, help="Batches per step.")] = 1,
    pack: Annotated[
        int | None,
        typer.Option(
            min=4, max=1 << 20, help="Pack the rows of a batch into sequences of so many tokens."
        ),
    ] = None,
    shard_target: Annotated[
        bool,
        typer.Option("--shard-target", help="Split the target's weights over all processes."),
    ] = False,
    rate: Annotated[
        float | None, typer.Option(min=0, help="Peak learning rate; default: the recipe's.")
    ] = None,
    ema: Annotated[
        float, typer.Option(min=0, max=0.99999, help="Decay of averaged weights; 0 = none.")
    ] = 0.0,
    bf16: Annotated[bool, typer.Option("--bf16", help="Compute the head in bfloat16.")] = False,
    muon: Annotated[
        bool, typer.Option("--muon", help="Weight matrices by Muon, at 13 times the rate.")
    ] = False,
    held_out: Annotated[
        int, typer.Option(min=1, help="Held-out questions for acceptance, at most a fifth.")
    ] = 32,
    every: Annotated[int, typer.Option(min=1, help="Steps between measured checkpoints.")] = 100,
    max_new_tokens: Annotated[
        int, typer.Option(min=2, max=1 << 16, help="Maximum number of tokens of an answer.")
    ] = 128,
    max_length: Annotated[
        int,
        typer.Option(
            min=4,
            max=1 << 20,
            help="Maximum number of tokens of an example; longer ones are skipped.",
        ),
    ] = 2048,
    temperature: Annotated[float, typer.Option(min=0, help="Of the target's answers.")] = 0.0,
    seed: Seed = 0,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE of the head's configuration.")
    ] = None,
    track: Annotated[
        list[Tracker] | None,
        typer.Option(help="Log loss, rate and acceptance there; repeatable."),
    ] = None,
    visual_slots: Annotated[
        VisualSlots | None,
        typer.Option(help="What a head reads at image slots; default: the recipe's."),
    ] = None,
    threads: Threads = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code from the target's folder.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print memory, disk, hours and data, and stop.")
    ] = False,
    devices: Annotated[
        int | None, typer.Option(min=1, max=1 << 16, help="Devices of a dry run; default: 1.")
    ] = None,
    assume: Annotated[
        str,
        typer.Option(
            help="A device of a dry run, such as tflops=400,memory_gbs=2000,link_gbs=200."
        ),
    ] = "",
    json: Json = False,
    placed: Any = None,
) -> None:
    """Train a recipe's drafter for a target; the same command resumes a stopped run."""
    given = {**locals(), "answers": answers.value}
    if given.pop("visual_slots") is not None:
        given["overrides"] = [*(overrides or ()), f"visual_slots={visual_slots}"]
    given |= {name: tuple(given[name] or ()) for name in ("overrides", "image_root", "track")}
    run_function("mmspec.cli.train:run", **given)


@app.command("phrases")
@model_command(
    "mmspec.cli.phrases:run", "train", without=PARTS, model=IMAGE_MODEL, recipe=["plain"]
)
def phrases(
    out: Annotated[
        Path | None, typer.Option(help="File to write; default: in the model's folder.")
    ] = None,
    pictures: Annotated[int, typer.Option(min=1, max=10**6, help="Number of images.")] = 256,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Prompts, used in turns; default: the bundled ones.")
    ] = None,
    merges: Annotated[
        int, typer.Option(min=0, max=10**6, help="Maximum number of phrases.")
    ] = 1000,
    longest: Annotated[
        int, typer.Option(min=2, max=64, help="Maximum number of codes of a phrase.")
    ] = 4,
    least: Annotated[int, typer.Option(min=1, help="Minimal count of a pair.")] = 2,
    batch: Annotated[int, typer.Option(min=1, max=4096, help="Images per batch.")] = 16,
) -> None:
    """Generate images and collect frequent runs of codes, for recipe sjd-pv."""


@app.command("constants")
@model_command("mmspec.cli.constants:run", "train", without=PARTS, model="zoo:vla")
def constants(
    out: Annotated[Path, typer.Option(help="Folder to write to.")],
    episodes: Annotated[int, typer.Option(min=2, max=10**5, help="Episodes to record.")] = 32,
    batch: Annotated[int, typer.Option(min=1, max=4096, help="Episodes side by side.")] = 16,
) -> None:
    """Fit constants of kerv and heisd to a robot policy's own episodes."""


@app.command("stop")
@model_command(
    "mmspec.cli.learned_parts:stop", "train", without=PARTS, recipe=["speculative-sampling"]
)
def stop(
    out: Annotated[Path, typer.Option(help="File to write, .safetensors.")],
    prompt: Annotated[
        list[str] | None, typer.Option(help="Prompts; default: bundled examples.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, max=10**6, help="Number of examples.")] = 64,
    length: Annotated[int, typer.Option(min=1, max=64, help="Tokens of each draft.")] = 8,
    steps: Annotated[int, typer.Option(min=1, max=10**6)] = 500,
) -> None:
    """Train what decides the draft length from the draft distribution (SpecDec++, DISCO)."""


@app.command("tree")
@model_command("mmspec.cli.learned_parts:tree", "train", without=PARTS, recipe=["coupled"])
def tree(
    out: Annotated[Path, typer.Option(help="File to write, .safetensors.")],
    prompt: Annotated[
        list[str] | None, typer.Option(help="Prompts; default: bundled examples.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, max=10**6, help="Number of examples.")] = 64,
    depth: Annotated[int, typer.Option(min=1, max=64, help="Levels of each tree.")] = 6,
    nodes: Annotated[int, typer.Option(min=1, max=4096, help="Nodes of each tree.")] = 48,
    steps: Annotated[int, typer.Option(min=1, max=10**6)] = 500,
) -> None:
    """Train what decides which nodes of a dynamic tree are drafted (C2T)."""


@app.command("judge")
@model_command(
    "mmspec.cli.learned_parts:judge", "train", without=PARTS, recipe=["speculative-sampling"]
)
def judge(
    out: Annotated[Path, typer.Option(help="File to write, .safetensors.")],
    prompt: Annotated[
        list[str] | None, typer.Option(help="Prompts; default: bundled examples.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, max=10**6, help="Number of examples.")] = 64,
    tail: Annotated[
        int, typer.Option(min=0, help="Last tokens by which answers are compared; 0 = all.")
    ] = 4,
    max_new_tokens: Annotated[
        int, typer.Option(min=2, help="Maximum number of tokens of an answer.")
    ] = 128,
    steps: Annotated[int, typer.Option(min=1, max=10**6)] = 300,
) -> None:
    """Train a judge of refused tokens, for recipe judge."""


@app.command("ngrams")
@model_command("mmspec.cli.learned_parts:ngrams", "train", without=PARTS, recipe=["plain"])
def ngrams(
    out: Annotated[Path, typer.Option(help="File to write, .safetensors.")],
    width: Annotated[int, typer.Option(min=1, max=1024, help="Next tokens of each token.")] = 10,
    batch: Annotated[int, typer.Option(min=1, max=65_536, help="Tokens per forward.")] = 256,
) -> None:
    """Read every token of the vocabulary alone: a table of next tokens, for recipe ngrammys."""


@app.command("datastore")
@model_command("mmspec.cli.datastore:run", "train", without=PARTS, recipe=["rest"])
def datastore(
    out: Annotated[Path, typer.Option(help="File to write, .npz.")],
    data: Annotated[
        Path | None,
        typer.Option(help="Data whose answers are kept; default: the model answers prompts."),
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Prompts; default: bundled examples.")
    ] = None,
    prompts: Annotated[
        int | None, typer.Option(min=1, max=10**6, help="Number of examples; default: 64.")
    ] = None,
) -> None:
    """Sort texts that outputs will resemble, for recipe rest (REST)."""


@app.command("cllm")
@model_command("mmspec.cli.consistency:run", "train", without=PARTS, recipe=["cllm"])
def cllm(
    out: Annotated[Path, typer.Option(help="A new folder for the trained target.")],
    prompt: Annotated[
        list[str] | None, typer.Option(help="Prompts; default: bundled examples.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, max=10**6, help="Number of examples.")] = 64,
    block: Annotated[int, typer.Option(min=2, max=256, help="Tokens iterated at once.")] = 16,
    max_new_tokens: Annotated[
        int, typer.Option(min=2, help="Maximum number of tokens of an answer.")
    ] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Random first states of a block.")] = 4,
    steps: Annotated[int, typer.Option(min=1, max=10**6)] = 500,
    rate: Annotated[float, typer.Option(min=0, help="Peak learning rate.")] = 2e-5,
) -> None:
    """Train a target that Jacobi iteration decodes in fewer steps (CLLM): a new model."""
