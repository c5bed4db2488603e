"""`mmspec bench`: how much sooner, and where the time goes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mmspec.cli import drawing, easel, painting
from mmspec.cli import inputs as given
from mmspec.cli.bench_continuous import bench_continuous
from mmspec.cli.bench_images import bench_images
from mmspec.cli.bench_pictures import bench_pictures
from mmspec.cli.generate import (
    Codes,
    Drafter,
    Guidance,
    Knobs,
    Length,
    Modality,
    Model,
    Steps,
    Temperature,
    Threads,
    Tree,
    Window,
)
from mmspec.cli.modality import DIFFUSION, IMAGE, modality_of
from mmspec.cli.output import Json, console, emit, pairs, percent, progress, table

app = typer.Typer(help="Measure speed-ups, efficiency and growth.", invoke_without_command=True)


@app.callback()
def bench(
    context: typer.Context,
    model: Model = given.MODEL,
    drafter: Drafter = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(help="One of `mmspec recipes`; for picture tokens several, or all."),
    ] = None,
    length: Length = None,
    tree: Tree = None,
    knobs: Knobs = None,
    image: Annotated[str | None, typer.Option(help="A picture, for models of your own.")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="What to ask; may be repeated.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="How many of the zoo's examples.")] = 16,
    kind: Annotated[
        str | None,
        typer.Option(help="Of the zoo's examples: caption or question; both if not said."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Prompts answered together.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    temperature: Temperature = None,
    seed: int = 0,
    peers: Annotated[bool, typer.Option(help="Measure transformers' own speculation too.")] = True,
    growth: Annotated[
        bool, typer.Option("--growth", help="Host time per round at 512 and 4096 tokens.")
    ] = False,
    modality: Modality = None,
    steps: Steps = None,
    window: Window = None,
    guidance: Guidance = None,
    codes: Codes = None,
    pictures: Annotated[
        int, typer.Option(min=0, help="Of picture tokens: how many the judge looks at; 0 = timed.")
    ] = 128,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Compare a recipe with `generate()` and its peers: same process, same prompts, in turns."""
    if context.invoked_subcommand is not None:
        return
    given.quiet()
    given.set_threads(threads, model)
    if growth:
        _growth(repeats, json)
        return
    kind = modality_of(modality, model, None if recipe is None else recipe[0])
    parts = given.shape(length, tree) | given.knobs(knobs)
    if kind == IMAGE and easel.is_continuous(model):
        stand = easel.load(
            model, drafter, recipe or easel.RECIPES, steps, guidance, temperature, parts
        )
        counts = (prompts, pictures, batch, repeats, seed)
        bench_continuous(stand, recipe or easel.RECIPES, prompt, *counts, json)
        return
    if kind == IMAGE:
        counts = (prompts, pictures, batch, repeats, seed)
        how = drawing.settings(model, guidance, temperature, codes)
        bench_images(model, drafter, recipe, prompt, how, parts, *counts, peers, json)
        return
    one = _single(recipe)
    if kind == DIFFUSION:
        painter = painting.load(model, drafter, one, steps)
        drafting = painting.parts(window, parts)
        bench_pictures(painter, prompt, prompts, batch, drafting, repeats, seed, json)
        return
    from mmspec.bench.compare import compare

    pair = given.load_pair(model, drafter, one)
    asked = workload(pair, image, prompt, prompts, batch, seed, kind)
    small, names = _also_for_peers(pair)
    with progress(json) as report:
        found = compare(
            pair.model,
            pair.recipe,
            small,
            asked,
            names=names,
            room=max_new_tokens,
            repeats=repeats,
            temperature=temperature or 0.0,
            seed=seed,
            peers=peers,
            progress=report,
            parts=parts,
        )
    if json:
        emit(found.to_dict())
    else:
        _print(found)


@app.command()
def scale(
    shape: Annotated[str, typer.Option(help="A published shape; `--shape list` names them.")],
    context: Annotated[list[int] | None, typer.Option(help="Prompt lengths.")] = None,
    acceptance: Annotated[
        list[float] | None, typer.Option(help="Chances that a drafted token is right.")
    ] = None,
    length: Annotated[int, typer.Option(min=1, help="Drafted tokens per round.")] = 5,
    max_new_tokens: Annotated[int, typer.Option(min=8)] = 128,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; the best by default.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16.")] = None,
    seed: int = 0,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Engine efficiency at a published size, with a drafter that knows the answer."""
    from mmspec.bench.scale import scale as measure
    from mmspec.bench.shapes import SHAPES

    given.quiet()
    given.set_threads(threads)
    if shape == "list":
        _shapes(SHAPES, json)
        return
    with progress(json) as report:
        found = measure(
            shape,
            contexts=tuple(context or (512, 2048)),
            rates=tuple(acceptance or (0.6, 0.8, 0.9)),
            length=length,
            room=max_new_tokens,
            batch=batch,
            repeats=repeats,
            device=device,
            dtype=dtype,
            seed=seed,
            progress=report,
        )
    if json:
        emit(found.to_dict())
        return
    where = found.environment
    heading = (
        f"{shape}, {found.parameters / 1e9:.2f} B parameters, {where['dtype']}, {where['device']}"
    )
    rows = [[getattr(point, column) for column in found.columns] for point in found.points]
    table(rows, *(column.replace("_", " ") for column in found.columns), heading=heading)
    console().print(found.note, style="dim")


def workload(
    pair: given.Pair,
    image: str | None,
    prompt: list[str] | None,
    prompts: int,
    batch: int,
    seed: int,
    kind: str | None = None,
) -> Any:
    """The zoo's held-out examples, or what the user asks of a model of their own."""
    from mmspec.bench.workload import QUESTIONS, Workload, from_zoo

    device = pair.model.get_input_embeddings().weight.device
    if pair.is_zoo and prompt is None and image is None:
        if kind not in (None, "caption", "question"):
            raise ValueError(f"--kind {kind} is not known; give caption or question")
        return from_zoo(pair.processor, device, max(prompts, batch), batch, seed, kind)
    if pair.sees and image is None:
        image = given.SCENE
    asked = prompt or (["Describe the picture in detail."] if pair.sees else list(QUESTIONS))
    if batch > 1:
        asked = [asked[index % len(asked)] for index in range(max(len(asked), batch))]
        asked = asked[: len(asked) - len(asked) % batch]
    groups = [asked[start : start + batch] for start in range(0, len(asked), batch)]
    return Workload([given.encode_batch(pair, group, image) for group in groups], batch)


def _single(recipe: list[str] | None) -> str | None:
    if recipe is not None and len(recipe) > 1:
        raise ValueError(
            f"--recipe was given {len(recipe)} times; several recipes are measured together only "
            "with --modality image"
        )
    return None if recipe is None else recipe[0]


def _also_for_peers(pair: given.Pair) -> tuple[Any, tuple[str, str | None]]:
    """The recipe's draft model, or the zoo's default one for stock assisted generation."""
    if pair.drafter is not None:
        return pair.drafter, pair.names
    name = given.default_drafter(pair.names[0])
    if name is None:
        return None, pair.names
    from mmspec.modalities.vlm.plug import load as load_model

    return load_model(given.present(name)), (pair.names[0], name)


def _print(found: Any) -> None:
    low, high = found.spread["speedup_end_to_end"]
    identical = None if found.identical is None else percent(found.identical)
    shares = (found.prefill_share, found.draft_share, found.verify_share, found.host_share)
    pairs(
        [
            ("recipe", f"{found.recipe} ({'exact' if found.exact else 'lossy'})"),
            ("model, drafter", [found.model, found.drafter]),
            ("speed-up end to end", f"{found.speedup_end_to_end:.2f}x ({low:.2f} to {high:.2f})"),
            ("speed-up, decoding only", f"{found.speedup_decode:.2f}x"),
            ("ideal speed-up", f"{found.ideal_speedup:.2f}x"),
            ("engine efficiency", found.engine_efficiency),
            ("mean acceptance length", found.mean_acceptance_length),
            ("acceptance histogram", found.acceptance_histogram),
            ("tokens per target call", found.tokens_per_target_call),
            ("prefill, draft, verify, host", ", ".join(map(percent, shares))),
            ("identical to generate()", identical),
            (
                f"{found.quality_metric}: target, method",
                [found.quality_target, found.quality_method],
            ),
            ("drafter saw", found.drafter_saw),
            ("measured", f"{found.requests} requests, {found.repeats} repeats, medians"),
            ("where", ", ".join(f"{key} {value}" for key, value in found.environment.items())),
        ]
    )
    console().print()
    rows = [
        (
            name,
            peer.get("speedup_end_to_end"),
            peer.get("tokens_per_target_call"),
            peer.get("skipped", ""),
        )
        for name, peer in found.peers.items()
    ]
    table(rows, "peer", "speed-up", "tokens per call", "")


def _growth(repeats: int, json: bool) -> None:
    from mmspec.bench.growth import growth

    with progress(json) as report:
        found = growth(repeats=repeats, progress=report)
    if json:
        emit(found.to_dict())
        return
    rows = [
        (p.context, p.rounds, 1e3 * p.round_seconds, 1e3 * p.forward_seconds, 1e3 * p.host_seconds)
        for p in found.points
    ]
    table(rows, "context", "rounds", "round ms", "forwards ms", "host ms")
    console().print(f"\nhost time grows by a factor of {found.ratio:.3f}")


def _shapes(shapes: Any, json: bool) -> None:
    if json:
        emit({name: shape.to_dict() for name, shape in shapes.items()})
        return
    rows = [
        (name, s.layers, s.hidden, s.heads, s.key_value_heads, s.vocabulary)
        for name, s in shapes.items()
    ]
    table(rows, "shape", "layers", "hidden", "heads", "kv heads", "vocabulary")
