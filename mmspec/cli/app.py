"""All commands: what each takes. Their work stands in modules that are imported when they run."""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from mmspec import __version__
from mmspec.cli import recipes, show, zoo
from mmspec.cli.groups import RecipeGroup, once
from mmspec.cli.options import PARTS, takes, work
from mmspec.cli.output import Json

DRAWS = "zoo:image"  # for commands that are about picture tokens whatever else there is
Modality = Annotated[str | None, typer.Option(help="Where a model has several.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Processor threads to use.")]
Prompts = Annotated[list[str] | None, typer.Option(help="What to ask; may be repeated.")]
Count = Annotated[int, typer.Option(min=1, help="How many of the zoo's examples are timed.")]
Repeats = Annotated[int, typer.Option(min=1, help="How often to measure.")]
Seed = Annotated[int, typer.Option(min=0)]
Csv = Annotated[Path | None, typer.Option(help="Write the points as CSV.")]
Answers = StrEnum("Answers", ["target", "data"])
Plot = Annotated[Path | None, typer.Option(help="Draw them, as SVG or PNG; needs matplotlib.")]

app = typer.Typer(
    name="mmspec",
    help="Speculative decoding for multimodal Hugging Face models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
measure = typer.Typer(help="Measure speed-ups, efficiency and growth.")
learn = typer.Typer(
    help="Learn from what a model says or draws: `mmspec train RECIPE` trains its head.",
    no_args_is_help=True,
    cls=RecipeGroup,
)


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    """Speculative decoding for multimodal Hugging Face models."""
    if version:
        typer.echo(__version__)


@app.command("generate")
@takes("mmspec.cli.generate", "generate")
def generate(
    prompt: Annotated[
        str, typer.Option(help="What to ask, or to draw; a sound may speak for itself.")
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="Where a picture goes; mmspec.png if not said.")
    ] = None,
    compare: Annotated[bool, typer.Option(help="Measure the model's own way as well.")] = True,
    repeats: Repeats = 5,
) -> None:
    """Answer a prompt, or draw it, and say how much sooner than without mmspec."""


@app.command("doctor")
def doctor(
    target: Annotated[
        str | None, typer.Argument(help="A folder, a hub name or zoo:NAME.", show_default=False)
    ] = None,
    drafter: Annotated[str | None, typer.Argument(help="A draft model for it.")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every class of the installed transformers, measured.")
    ] = False,
    modality: Modality = None,
    json: Json = False,
) -> None:
    """Check a model, or a pair, before loading any weights. Exit code 1 if it is refused."""
    if every == (target is not None):
        raise typer.BadParameter("give a model, or --all and none")
    if every and modality is not None:
        raise typer.BadParameter("--all looks at every class, whatever --modality; drop that")
    if every:
        work("mmspec.cli.survey", json)
    else:
        work("mmspec.cli.doctor", target, drafter, modality, json)


@app.command("compressors")
def compressors(json: Json = False) -> None:
    """List the compressors of pictures: parameters, what each needs, how many tokens it keeps."""
    work("mmspec.cli.compressors", json)


@app.command("certify")
@takes("mmspec.cli.certify", "certify", without=("recipe", "seed", "verifier", "knobs", *PARTS))
def certify(
    recipe: Annotated[str, typer.Argument(help="One of `mmspec recipes`.")],
    prompts: Annotated[int, typer.Option(min=1, help="Prompts for greedy equality.")] = 20,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds for sampled equality.")] = 50,
    samples: Annotated[int, typer.Option(min=500, help="Samples per frequency test.")] = 6000,
    seed: Annotated[
        int, typer.Option(min=0, help="Chooses the prompts; samples are of seeds 0, 1, ... always.")
    ] = 0,
) -> None:
    """Prove or refute that a recipe is lossless. Exit code 1 when its claim is refuted."""


@measure.callback(invoke_without_command=True)
@takes("mmspec.cli.bench", "bench", alone={"growth": ("repeats", "threads", "json")})
def measured(
    context: typer.Context,
    prompt: Prompts = None,
    prompts: Count = 16,
    batch: Annotated[int, typer.Option(min=1, help="Prompts answered together.")] = 1,
    repeats: Repeats = 5,
    peers: Annotated[bool, typer.Option(help="Measure what the library speculates itself.")] = True,
    controls: Annotated[bool, typer.Option(help="Measure drafters that know nothing.")] = False,
    efficiency: Annotated[bool, typer.Option(help="Measure the forwards alone as well.")] = True,
    growth: Annotated[
        bool, typer.Option("--growth", help="Host time per round at 512 and 4096 tokens.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write the recipes, fastest first, as CSV or Markdown.")
    ] = None,
    plot: Plot = None,
) -> None:
    """Compare recipes with the model's own way and its peers: one process, same prompts, in turns.

    --recipe may be repeated, or be `all`: whatever has weights, ranked; published trees run once
    more with `--tree auto`. --plot draws speed over acceptance length.
    """


@measure.command("sweep")
@takes("mmspec.cli.sweep", "bench", without=PARTS, model=DRAWS)
def sweep(
    prompt: Prompts = None,
    prompts: Count = 8,
    repeats: Repeats = 3,
    out: Csv = None,
    plot: Plot = None,
) -> None:
    """Turn the knobs of relaxed recipes: calls saved, quality, distance from the target."""


@measure.command("overlap")
@takes("mmspec.cli.overlap", "bench", without=("recipe", "verifier", "knobs", *PARTS))
def overlap(
    prompt: Prompts = None,
    prompts: Count = 4,
    repeats: Repeats = 3,
    window: Annotated[
        list[int] | None, typer.Option(help="Tokens drafted per target forward; repeatable.")
    ] = None,
    refill: Annotated[
        bool, typer.Option("--refill", help="Behind a rejection wait for a whole window.")
    ] = False,
) -> None:
    """Draft while the target verifies: gain measured here, and predicted for two devices."""


@measure.command("compressors")
@takes("mmspec.cli.catalogue", "bench", without=("compressor", "kv", "window", "max_rows"))
def catalogue(
    prompt: Prompts = None,
    prompts: Count = 8,
    repeats: Repeats = 3,
    only: Annotated[
        list[str] | None, typer.Option(help="NAME or NAME:keep=0.25; repeatable. All if not said.")
    ] = None,
    out: Csv = None,
    plot: Plot = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw which tokens each leaves, over the frames of a clip.")
    ] = None,
) -> None:
    """Race compressors on one pair: kept tokens, acceptance, the draft model's prefill, speed."""


@measure.command("views")
def views(
    shape: Annotated[str, typer.Option(help="A decoder, of `bench scale --shape list`.")] = "small",
    visual: Annotated[list[int] | None, typer.Option(help="Visual tokens; repeatable.")] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(help="Of them, that a draft reads; repeatable.")
    ] = None,
    length: Annotated[int, typer.Option(min=1, help="Drafted tokens per round.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per context.")] = 8,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    seed: Seed = 0,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Draft on part of the target's memory (StD): time per round as visual contexts grow."""
    how: dict[str, Any] = {"length": length, "rounds": rounds, "device": device, "seed": seed}
    work("mmspec.cli.views", shape, visual, tokens, threads, json, **how)


@measure.command("scale")
def scale(
    shape: Annotated[str, typer.Option(help="A published shape; `--shape list` names them.")],
    context: Annotated[list[int] | None, typer.Option(help="Prompt lengths.")] = None,
    acceptance: Annotated[
        list[float] | None, typer.Option(help="Chances that a drafted token is right.")
    ] = None,
    length: Annotated[int, typer.Option(min=1, help="Drafted tokens per round.")] = 5,
    max_new_tokens: Annotated[int, typer.Option(min=8)] = 128,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    repeats: Repeats = 3,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; the best by default.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16.")] = None,
    seed: Seed = 0,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Engine efficiency at a published size, with a drafter that knows the answer."""
    sizes: dict[str, Any] = {"length": length, "batch": batch, "repeats": repeats, "seed": seed}
    place = {"device": device, "dtype": dtype}
    work(
        "mmspec.cli.scale",
        shape,
        context,
        acceptance,
        threads,
        max_new_tokens,
        json,
        **sizes,
        **place,
    )


@learn.command("recipe")
def train(
    recipe: Annotated[
        str, typer.Argument(help="A recipe that drafts with what can be taught, such as eagle-2.")
    ],
    target: Annotated[str, typer.Option(help="Whose head: a folder, a hub name or zoo:NAME.")],
    data: Annotated[
        Path,
        typer.Option(help="A .jsonl file, a folder, or episodes that a policy plays: table:64."),
    ],
    out: Annotated[Path, typer.Option(help="A new folder, or one of a run to go on with.")],
    images: Annotated[
        Path | None, typer.Option(help="Where the pictures lie; beside the data if not said.")
    ] = None,
    answers: Annotated[
        Answers, typer.Option(help="Learn what the target answers, or what the data say.")
    ] = Answers.target,
    head: Annotated[
        Path | None,
        typer.Option("--head", "--drafter", help="A head, or a small model, to begin with."),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="A folder to keep the target's states in; a new one.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1)] = 2000,
    batch: Annotated[int, typer.Option(min=1, help="Questions read together.")] = 8,
    accumulate: Annotated[int, typer.Option(min=1, help="Batches of a step.")] = 1,
    rate: Annotated[
        float | None, typer.Option(min=0, help="Highest learning rate; the recipe's if not said.")
    ] = None,
    ema: Annotated[
        float, typer.Option(min=0, max=0.99999, help="Decay of averaged weights; 0 = none.")
    ] = 0.0,
    bf16: Annotated[bool, typer.Option("--bf16", help="Let the head compute in bfloat16.")] = False,
    muon: Annotated[
        bool, typer.Option("--muon", help="Weight matrices by Muon, at 13 times the rate.")
    ] = False,
    held_out: Annotated[
        int, typer.Option(min=1, help="Questions, a fifth at most, that acceptance is measured on.")
    ] = 32,
    every: Annotated[int, typer.Option(min=1, help="Steps between measured checkpoints.")] = 100,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer at most.")] = 128,
    max_length: Annotated[int, typer.Option(min=4, help="Longer examples are left out.")] = 2048,
    temperature: Annotated[float, typer.Option(min=0, help="Of the target's answers.")] = 0.0,
    seed: Seed = 0,
    knobs: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE of the head's configuration.")
    ] = None,
    threads: Threads = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that lies in the target's folder.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print parameters, memory and data, and stop.")
    ] = False,
    json: Json = False,
) -> None:
    """Train a recipe's drafter for a target; the same command goes on with what was stopped."""
    given = {**locals(), "answers": answers.value, "knobs": tuple(knobs or ())}
    work("mmspec.cli.train", **given)


@learn.command("phrases")
@takes("mmspec.cli.phrases", "train", without=PARTS, model=DRAWS, recipe=["plain"])
def phrases(
    out: Annotated[
        Path | None, typer.Option(help="File to write; beside the model by default.")
    ] = None,
    pictures: Annotated[int, typer.Option(min=1, help="How many to draw.")] = 256,
    prompt: Annotated[
        list[str] | None, typer.Option(help="What to draw, in turns; the zoo has its own.")
    ] = None,
    merges: Annotated[int, typer.Option(min=0, help="Phrases at most.")] = 1000,
    longest: Annotated[int, typer.Option(min=2, help="Codes of a phrase at most.")] = 4,
    least: Annotated[int, typer.Option(min=1, help="How often a pair must occur.")] = 2,
    batch: Annotated[int, typer.Option(min=1, help="Pictures drawn at once.")] = 16,
) -> None:
    """Draw pictures and collect frequent runs of codes, for recipe sjd-pv."""


@app.command("convert")
def convert(
    layout: Annotated[
        str | None, typer.Argument(metavar="[FORMAT]", help="All are listed if not said.")
    ] = None,
    files: Annotated[list[Path] | None, typer.Argument(help="What the authors published.")] = None,
    out: Annotated[Path | None, typer.Option(help="A new folder, of safetensors.")] = None,
    knobs: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE, what no file says; repeatable.")
    ] = None,
    json: Json = False,
) -> None:
    """Turn weights as published into a folder that loads here; of pickles no code runs."""
    work("mmspec.cli.convert", layout, files or [], out, knobs, json)


@app.command("export")
def export(
    layout: Annotated[str, typer.Argument(metavar="FORMAT", help="One of `mmspec convert`.")],
    head: Annotated[Path, typer.Argument(help="The folder of a head.")],
    out: Annotated[Path, typer.Option(help="A new folder, of config.json and safetensors.")],
    target: Annotated[
        str | None, typer.Option(help="Name of its target on a hub, where the format names it.")
    ] = None,
    json: Json = False,
) -> None:
    """Write a head in a published layout, for the engines that read that."""
    work("mmspec.cli.export", layout, head, out, target, json)


app.command("recipes")(recipes.recipes)
app.command("show")(show.show)
app.add_typer(measure, name="bench")
app.add_typer(learn, name="train")
app.add_typer(zoo.app, name="zoo")


@cache
def commands() -> Any:
    """The tree of all commands, made once: it takes longer than most of them."""
    made: Any = typer.main.get_command(app)
    once(made)
    return made
