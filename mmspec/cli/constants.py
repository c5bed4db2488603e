"""`mmspec train constants`: fit constants of recipes of actions to episodes of a policy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mmspec.cli.models import LoadedModels, load, select
from mmspec.cli.options import ModelOptions
from mmspec.cli.output import print_json, print_pairs, show_progress
from mmspec.codes.action_constants import ActionConstants
from mmspec.training import action_constants as fitting

Fitted = tuple[ActionConstants, dict[str, float]]


def run(options: ModelOptions, out: Path, episodes: int, batch: int) -> None:
    """Record episodes in training scenes, and save the constants that fit them into a folder."""
    selected = select(options)
    for name in selected.recipes:
        if name not in FITS:
            raise ValueError(
                f"recipe {name!r} has no constants to fit; give --recipe {' or '.join(FITS)}"
            )
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; give a folder")
    loaded = load(options, selected)
    found, figures = ActionConstants(), dict[str, float]()
    with show_progress(options.json) as bar:
        for name in selected.recipes:
            record = partial(
                fitting.record,
                world=selected.settings.world,
                count=episodes,
                batch=batch,
                seed=options.seed,
                steps=selected.settings.steps,
                progress=lambda stage, done, total, _: bar(stage, done, total),
            )
            fitted, known = FITS[name](loaded, record, out)
            pair = (fitted, found) if name == "kerv" else (found, fitted)
            found = fitting.merge(*pair)
            figures |= known
    report = {
        "recipes": list(selected.recipes),
        "model": selected.model,
        "world": selected.settings.world,
        "episodes": episodes,
        "seed": options.seed,
        "figures": figures,
    }
    file = found.save(out, **report)
    if options.json:
        print_json({"out": str(file), "constants": vars(found), **report})
        return
    own = {name: vars(found)[name] for recipe in selected.recipes for name in NAMES[recipe]}
    sets = (f"--set {name}.constants={out}" for name in selected.recipes)
    print_pairs([*own.items(), *figures.items(), ("use them", " ".join(sets))])


def _fit_kerv(loaded: LoadedModels, record: Callable[..., Any], out: Path) -> Fitted:
    """Episodes with the largest radius and without completions, which would be forecasts."""
    fast = loaded.accelerate("kerv", lockout=float("inf"), least=15.0, most=15.0)
    options = fast.recipe.options
    session: Any = fast.session
    space = session.binder.bind_default().space
    return fitting.fit_motion(record(fast), space, options["beta"], options["window"])


def _fit_heisd(loaded: LoadedModels, record: Callable[..., Any], out: Path) -> Fitted:
    """Episodes of plain decoding, which also become the store."""
    fast = loaded.accelerate_plain()
    session: Any = fast.session
    store = fitting.store_moments(fast, record(fast))
    store.save(out)
    bias = loaded.selection.own_options.get("heisd", {}).get("bias", 15.0)
    return fitting.fit_matches(store, session.binder.bind_default().space, bias)


FITS: dict[str, Callable[[LoadedModels, Callable[..., Any], Path], Fitted]] = {
    "kerv": _fit_kerv,
    "heisd": _fit_heisd,
}
NAMES = {
    "kerv": ("reference", "motion", "process", "measurement"),
    "heisd": ("theta", "delta"),
}
