"""Run robot episodes plainly and speculatively, and compare success and latency.

    python demos/robot.py                                    # the bundled policy and its table
    python demos/robot.py --recipe spec-vla --recipe hold-last --episodes 5
    python demos/robot.py --model DIR --drafter DIR --world metaworld
    python demos/robot.py --recipe spec-vla --set length=6 --episodes 200 --robots 20  # success

All recipes run the same episodes in closed loop. The table has success, target calls per action,
acceptance length, control frequency, jitter (p50 and p99 in milliseconds) and whether all tokens
equal those of plain decoding: always for exact recipes (in float32). Writes an animation of the
first episode with all recipes on one clock, in real time (--slower 10: ten times slower), and a map
of accepted and corrected action tokens.

With --robots so many episodes run in one batch. The table then has only what does not depend on
time: success with its 95 % interval (Wilson), and the number of paired episodes that only this
recipe or only plain decoding solved (McNemar, with p).
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from mmspec.cli.models import load_models
from mmspec.cli.output import show_progress
from mmspec.modalities.common.sheets import save_animation
from mmspec.modalities.vla.quality import latency_figures, mcnemar, wilson
from mmspec.modalities.vla.rendering import draw_acceptance_map, render_frames
from mmspec.modalities.vla.rollout import Rollout
from mmspec.modalities.vla.worlds import make_held_out_world

console = Console(highlight=False)
RECIPES = ("hold-last", "hold-last-tolerance", "spec-vla")


def main(
    model: Annotated[str | None, typer.Option(help="A folder; default: the bundled model.")] = None,
    drafter: Annotated[
        str | None, typer.Option(help="Draft model; default: the bundled one.")
    ] = None,
    recipe: Annotated[list[str] | None, typer.Option(help="May be repeated.")] = None,
    world: Annotated[
        str, typer.Option(help="Environment: table, moving-goals, metaworld.")
    ] = "table",
    instruction: Annotated[str | None, typer.Option(help="Default: of the environment.")] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Number of episodes.")] = 3,
    steps: Annotated[int | None, typer.Option(min=1, help="Maximum length of an episode.")] = None,
    deadline_ms: Annotated[float | None, typer.Option(help="Deadline of an action.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE, or RECIPE.NAME=VALUE.")
    ] = None,
    slower: Annotated[int, typer.Option(min=1, help="Slow the animation by this factor.")] = 1,
    robots: Annotated[int, typer.Option(min=1, help="Episodes in a batch.")] = 1,
    seed: int = 0,
    out: Annotated[Path, typer.Option(help="Folder for the images.")] = Path(),
) -> None:
    """Run every episode plainly and with every recipe."""
    torch.set_num_threads(1)  # models this small gain nothing from more
    chosen = recipe or list(RECIPES)
    settings = {
        "world": world,
        "instruction": instruction,
        "steps": steps,
        "deadline_ms": deadline_ms,
    }
    try:
        loaded = load_models(model, "vla", drafter, chosen, seed, overrides, **settings)
        ways = {
            "plain": loaded.accelerate_plain(),
            **{name: loaded.accelerate(name) for name in chosen},
        }
    except ValueError as error:
        raise SystemExit(str(error)) from None
    request = loaded.formatter.request([])
    for fast in ways.values():
        fast.rollout(**{**request, "steps": 1}, seed=seed)  # warm-up
    rollouts: dict[str, list[Rollout]] = {name: [] for name in ways}
    with show_progress(False) as bar:
        for index in range(0, episodes, robots):
            count = min(robots, episodes - index)
            for place, (name, fast) in enumerate(ways.items()):
                bar("episodes", index * len(ways) + place * count, episodes * len(ways))
                if robots == 1:
                    rollouts[name].append(loaded.call(fast, request, seed + index))
                else:
                    worlds = [make_held_out_world(world) for _ in range(count)]
                    batch = {**request, "environment": worlds}
                    rollouts[name] += loaded.call(fast, batch, seed + index)
    if robots > 1:
        _success(rollouts)
        return
    _table(rollouts, ways)
    first = {name: column[0] for name, column in rollouts.items()}
    written = [out / "robot.gif", out / "robot.png"]
    save_animation(written[0], *render_frames(first, slower))
    draw_acceptance_map(first).save(written[1])
    console.print(f"written to {out.resolve()}: {', '.join(file.name for file in written)}")


def _success(rollouts: dict[str, list[Rollout]]) -> None:
    table = Table(box=None, padding=(0, 1))
    table.add_column("recipe", no_wrap=True)
    for title in ("success", "95 %", "only this", "only plain", "p", "steps", "calls"):
        table.add_column(title)
    plain = [one.is_success for one in rollouts["plain"]]
    for name, column in rollouts.items():
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


def _table(rollouts: dict[str, list[Rollout]], ways: dict[str, Any]) -> None:
    table = Table(box=None, padding=(0, 1))
    table.add_column("recipe", no_wrap=True)
    for title in ("success", "steps", "calls", "length", "Hz", "jitter", "as plain", "claims"):
        table.add_column(title)
    for name, column in rollouts.items():
        every = [step for one in column for step in one.steps]
        found = latency_figures(every, column)
        shakes = found.get("jitter, ms")
        pairs = zip(column, rollouts["plain"], strict=True)
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
