"""Robot episodes, plain and speculative, side by side.

    python demos/robot.py                                    # the bundled policy and its table
    python demos/robot.py --recipe spec-vla --recipe hold-last --episodes 5
    python demos/robot.py --model DIR --drafter DIR --world metaworld
    python demos/robot.py --recipe spec-vla --set length=6 --episodes 200 --robots 20  # success

Every way acts in the same episodes, in closed loop: what it does is what it sees next. The table
has success, calls of the target per action, acceptance length, control frequency, jitter (p50 and
p99 in milliseconds) and whether every token was as plain decoding has it: always, of recipes that
claim to be exact (in float32, as the zoo is loaded). Writes an animation of the first episode, all
ways side by side, and a map of where each component of its actions came from.

With --robots so many episodes run at once, in one batch. The table then has what does not depend on
the clock: success with its 95 % interval (Wilson), and on paired episodes how many only this way or
only plain decoding solved (McNemar, with its p).
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from mmspec.cli.loaded import opened
from mmspec.cli.output import progress
from mmspec.modalities.common.animation import save
from mmspec.modalities.vla.acceptance import acceptance_map
from mmspec.modalities.vla.animation import frames
from mmspec.modalities.vla.formatting import held_out
from mmspec.modalities.vla.judging import mcnemar, pace, wilson
from mmspec.modalities.vla.rollout import Rollout

console = Console(highlight=False)
RECIPES = ("hold-last", "hold-last-tolerance", "spec-vla")


def main(
    model: Annotated[str | None, typer.Option(help="A folder; the zoo's own if not said.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Draft model; the zoo has its own.")] = None,
    recipe: Annotated[list[str] | None, typer.Option(help="May be repeated.")] = None,
    world: Annotated[str, typer.Option(help="Where to act: table, metaworld.")] = "table",
    instruction: Annotated[str | None, typer.Option(help="The world's own if not said.")] = None,
    episodes: Annotated[int, typer.Option(min=1, help="How many.")] = 3,
    steps: Annotated[int | None, typer.Option(min=1, help="Of an episode at most.")] = None,
    deadline_ms: Annotated[float | None, typer.Option(help="Of an action.")] = None,
    knobs: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE, or RECIPE.NAME=VALUE.")
    ] = None,
    robots: Annotated[int, typer.Option(min=1, help="Episodes that run at once.")] = 1,
    seed: int = 0,
    out: Annotated[Path, typer.Option(help="Folder of the pictures.")] = Path(),
) -> None:
    """Act in every episode plainly and with every recipe."""
    torch.set_num_threads(1)  # models this small gain nothing from more
    chosen = recipe or list(RECIPES)
    said = {"world": world, "instruction": instruction, "steps": steps, "deadline_ms": deadline_ms}
    try:
        loaded = opened(model, "vla", drafter, chosen, seed, knobs, **said)
        ways = {"plain": loaded.plain(), **{name: loaded.fast(name) for name in chosen}}
    except ValueError as error:
        raise SystemExit(str(error)) from None
    request = loaded.formatter.request([])
    for fast in ways.values():
        fast.rollout(**{**request, "steps": 1}, seed=seed)  # warm-up
    went: dict[str, list[Rollout]] = {name: [] for name in ways}
    with progress(False) as bar:
        for index in range(0, episodes, robots):
            count = min(robots, episodes - index)
            for place, (name, fast) in enumerate(ways.items()):
                bar("episodes", index * len(ways) + place * count, episodes * len(ways))
                if robots == 1:
                    went[name].append(loaded.ask(fast, request, seed + index))
                else:
                    worlds = [held_out(world) for _ in range(count)]
                    asked = {**request, "environment": worlds}
                    went[name] += loaded.ask(fast, asked, seed + index)
    if robots > 1:
        _success(went)
        return
    _table(went, ways)
    first = {name: column[0] for name, column in went.items()}
    written = [out / "robot.gif", out / "robot.png"]
    save(written[0], frames(first))
    acceptance_map(first).save(written[1])
    console.print(f"written to {out.resolve()}: {', '.join(file.name for file in written)}")


def _success(went: dict[str, list[Rollout]]) -> None:
    table = Table(box=None, padding=(0, 1))
    table.add_column("recipe", no_wrap=True)
    for title in ("success", "95 %", "only this", "only plain", "p", "steps", "calls"):
        table.add_column(title)
    plain = [one.is_success for one in went["plain"]]
    for name, column in went.items():
        solved = [one.is_success for one in column]
        found, (low, high) = mcnemar(solved, plain), wilson(sum(solved), len(solved))
        every = [step for one in column for step in one.steps]
        table.add_row(
            name,
            f"{sum(solved)} of {len(solved)}",
            f"{low:.1%} to {high:.1%}",
            *(f"{found[title]:.3g}" for title in ("only this", "only plain", "p")),
            f"{fmean(len(one.actions) for one in column):.1f}",
            f"{fmean(one.target_calls for one in every):.2f}",
        )
    console.print(table)


def _table(went: dict[str, list[Rollout]], ways: dict[str, Any]) -> None:
    table = Table(box=None, padding=(0, 1))
    table.add_column("recipe", no_wrap=True)
    for title in ("success", "steps", "calls", "length", "Hz", "jitter", "as plain", "claims"):
        table.add_column(title)
    for name, column in went.items():
        every = [step for one in column for step in one.steps]
        found = pace(every, column)
        shakes = found.get("jitter, ms")
        pairs = zip(column, went["plain"], strict=True)
        table.add_row(
            name,
            f"{sum(one.is_success for one in column)} of {len(column)}",
            f"{fmean(len(one.actions) for one in column):.1f}",
            f"{fmean(one.target_calls for one in every):.2f}",
            f"{fmean(one.acceptance_length for one in every):.2f}",
            f"{found['control, Hz']:.1f}",
            f"{shakes['p50']:.1f}, {shakes['p99']:.1f}" if shakes else "-",
            "yes" if all(mine.tokens == plain.tokens for mine, plain in pairs) else "no",
            "exact" if ways[name].recipe.exact else "lossy",
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
