"""`mmspec generate`: an answer, and what speculation made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mmspec.cli import drawing, easel, painting
from mmspec.cli import inputs as given
from mmspec.cli.draw import draw
from mmspec.cli.draw_continuous import draw_continuous
from mmspec.cli.modality import DIFFUSION, IMAGE, modality_of
from mmspec.cli.output import Json, console, emit, pairs, percent, progress
from mmspec.cli.paint import paint

Model = Annotated[str, typer.Option(help="Target: a folder, a hub name or zoo:NAME.")]
Drafter = Annotated[str | None, typer.Option(help="Draft model; the zoo has its own.")]
Recipe = Annotated[str | None, typer.Option(help="One of `mmspec recipes`.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Processor threads to use.")]
Temperature = Annotated[
    float | None, typer.Option(min=0, help="0 is greedy, and the default of text; 1 of pictures.")
]
Modality = Annotated[
    str | None,
    typer.Option(
        help="diffusion or image: draw, by a pipeline or by picture tokens; else it follows from "
        "model and recipe."
    ),
]
Guidance = Annotated[
    float | None, typer.Option(help="Of picture tokens: the published scale if not said, 1 = none.")
]
Codes = Annotated[
    str | None,
    typer.Option(help="Size of one picture in codes, rows x columns as in 24x24, if it can vary."),
]
Steps = Annotated[int | None, typer.Option(min=2, help="Steps of a diffusion sampler.")]
Window = Annotated[
    int | None, typer.Option(min=1, help="States a round of diffusion moves a picture at most.")
]
Knobs = Annotated[
    list[str] | None,
    typer.Option("--set", help="A knob of the recipe, NAME=VALUE (see `mmspec show`); repeatable."),
]
Length = Annotated[str | None, typer.Option(help="Draft length: a number, auto, entropy, ...")]
Tree = Annotated[str | None, typer.Option(help="Branching widths such as 3,2,1, or dynamic.")]


def generate(
    prompt: Annotated[str, typer.Option(help="What to ask.")],
    image: Annotated[str | None, typer.Option(help="A picture file, or zoo:scene.")] = None,
    model: Model = given.MODEL,
    drafter: Drafter = None,
    recipe: Recipe = None,
    length: Length = None,
    tree: Tree = None,
    knobs: Knobs = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Temperature = None,
    seed: int = 0,
    compare: Annotated[bool, typer.Option(help="Measure plain generate() as well.")] = True,
    repeats: Annotated[int, typer.Option(min=1, help="How often to measure.")] = 5,
    modality: Modality = None,
    steps: Steps = None,
    window: Window = None,
    guidance: Guidance = None,
    grid: Annotated[
        str | None, typer.Option(help="Of picture tokens: a sheet of pictures, as in 4x4.")
    ] = None,
    codes: Codes = None,
    out: Annotated[Path, typer.Option(help="Where a drawn picture goes.")] = Path("mmspec.png"),
    steps_map: Annotated[
        Path | None, typer.Option(help="Of picture tokens: a map of the round each patch came in.")
    ] = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Answer a prompt about a picture, or draw one, and say how much sooner than without mmspec."""
    given.quiet()
    given.set_threads(threads, model)
    kind, again = modality_of(modality, model, recipe), repeats if compare else 0
    parts = given.shape(length, tree) | given.knobs(knobs)
    if kind == IMAGE and easel.is_continuous(model):
        if codes is not None or steps_map is not None:
            raise ValueError(f"{model} draws no codes; drop --codes and --steps-map")
        recipe = recipe or easel.RECIPES[0]
        stand = easel.load(model, drafter, [recipe], steps, guidance, temperature, parts)
        draw_continuous(stand, recipe, prompt, drawing.sheet(grid), out, seed, again, json)
        return
    if kind == IMAGE:
        recipe = recipe or drawing.RECIPE
        studio = drawing.load(model, drafter, [recipe])
        how = (drawing.settings(model, guidance, temperature, codes), parts)
        draw(studio, recipe, prompt, drawing.sheet(grid), out, steps_map, *how, seed, again, json)
        return
    if kind == DIFFUSION:
        painter = painting.load(model, drafter, recipe, steps)
        paint(painter, prompt, out, painting.parts(window, parts), seed, again, json)
        return
    pair = given.load_pair(model, drafter, recipe)
    request = given.encode(pair, prompt, image)
    settings: dict[str, Any] = {"do_sample": bool(temperature)}
    if temperature:
        settings["temperature"] = temperature
    import mmspec

    fast = mmspec.accelerate(pair.model, pair.recipe, drafter=pair.drafter, **parts)
    made = fast.generate(**request, **settings, max_new_tokens=max_new_tokens, seed=seed)
    tokenizer = getattr(pair.processor, "tokenizer", pair.processor)
    new = made.sequences[0, request["input_ids"].shape[1] :]
    document: dict[str, Any] = {
        "text": tokenizer.decode(new, skip_special_tokens=True).strip(),
        "model": model,
        "drafter": pair.names[1],
        "recipe": pair.recipe,
        "exact": made.stats.exact,
        "tokens": new.tolist(),
    }
    if compare:
        with progress(json) as report:
            document |= _compared(fast, request, settings, max_new_tokens, seed, repeats, report)
    document["stats"] = made.stats.to_dict()
    if json:
        emit(document)
        return
    console().print(document["text"], markup=False)
    console().print()
    pairs(_rows(document, made.stats))


def _compared(
    fast: Any,
    request: dict[str, Any],
    settings: dict[str, Any],
    room: int,
    seed: int,
    repeats: int,
    report: Any,
) -> dict[str, Any]:
    """Plain `generate()` and the recipe in turns, in this process."""
    from mmspec.api import accelerate
    from mmspec.bench.players import Generate, Player, Speculative
    from mmspec.bench.timing import Ratio, race
    from mmspec.verifiers.coupled import Coupled

    method = Speculative(fast, settings, seed=seed)
    players: list[Player] = [Generate(fast.model, settings, seed=seed), method]
    laps = race(players, [request], room, repeats, report).laps
    plain, mine = laps["generate"], laps["method"]
    whole = Ratio.of(plain.per_token(), mine.per_token())
    later = Ratio.of(plain.per_later_token(), mine.per_later_token())
    same: dict[str, Any] = {"identical_to_generate": None, "identical_to_plain": None}
    if not settings["do_sample"]:
        same["identical_to_generate"] = plain.answers[0].tokens == mine.answers[0].tokens
    elif isinstance(fast.recipe.verifier, Coupled):
        steady = Speculative(accelerate(fast.model, "plain"), settings, seed=seed)
        same["identical_to_plain"] = steady.answer(request, room).tokens == mine.answers[0].tokens
    return {
        "speedup_end_to_end": whole.median,
        "speedup_decode": later.median,
        "spread": {"speedup_end_to_end": whole.spread, "speedup_decode": later.spread},
        **same,
    }


def _rows(document: dict[str, Any], stats: Any) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    if "speedup_end_to_end" in document:
        low, high = document["spread"]["speedup_end_to_end"]
        speed = f"{document['speedup_end_to_end']:.2f}x ({low:.2f} to {high:.2f})"
        rows += [
            ("speed-up over generate()", speed),
            ("  decoding only", f"{document['speedup_decode']:.2f}x"),
        ]
        if document["identical_to_generate"] is not None:
            rows.append(("identical to generate()", document["identical_to_generate"]))
        if document["identical_to_plain"] is not None:
            same = document["identical_to_plain"]
            rows.append(("identical to plain decoding with this seed", same))
    parts = ("prefill", "draft", "verify", "host")
    shares = [getattr(stats, f"{part}_seconds") / stats.total_seconds for part in parts]
    rows += [
        ("mean acceptance length", stats.mean_acceptance_length),
        ("tokens per target call", stats.tokens_per_target_call),
        ("new tokens, target calls", f"{stats.num_new_tokens}, {stats.target_calls}"),
        ("prefill, draft, verify, host", ", ".join(map(percent, shares))),
        ("drafter saw", stats.drafter_saw),
        ("recipe", f"{document['recipe']} ({'exact' if stats.exact else 'lossy'})"),
        ("model, drafter", [document["model"], document["drafter"]]),
    ]
    if stats.fallback:
        rows.append(("fell back to plain decoding", stats.fallback))
    return rows
