"""`mmspec train stop`, `tree`, `judge` and `ngrams`: small networks and tables beside a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmspec import recipes
from mmspec.cli.bench import workload
from mmspec.cli.models import LoadedModels, check_writable, load, select
from mmspec.cli.options import ModelOptions
from mmspec.cli.output import console, format_percent, print_json, print_pairs
from mmspec.drafters.lookup.bigram_table import BigramTable
from mmspec.drafters.shapes import Shape
from mmspec.recipe import LINEAR
from mmspec.training.judges import same_end, train_judge
from mmspec.training.stops import train_stop
from mmspec.training.tree_heads import train_tree

RECIPE = "speculative-sampling"  # drafts and verifies while the networks are trained


def stop(
    options: ModelOptions,
    out: Path,
    prompt: list[str] | None,
    prompts: int,
    length: int,
    steps: int,
) -> None:
    """Train a stop head and save it."""
    loaded = _load(options, out)

    def bind(shape: Shape) -> Any:
        return loaded.accelerate(loaded.selection.recipe, tree=shape)

    requests = _requests(loaded, prompt, prompts, options.seed)
    found = train_stop(bind, requests, length, steps, seed=options.seed)
    found.head.save(out)
    document = {
        "out": str(out),
        "tokens": found.num_tokens,
        "acceptance": found.acceptance,
        "loss": found.loss,
    }
    _report(
        options,
        document,
        f"{out}: for --length specdec-pp:head={out}, or disco:head={out}",
        [
            ("drafted tokens", found.num_tokens),
            ("accepted", format_percent(found.acceptance)),
            ("loss", f"{found.loss:.3f}"),
        ],
    )


def tree(
    options: ModelOptions,
    out: Path,
    prompt: list[str] | None,
    prompts: int,
    depth: int,
    nodes: int,
    steps: int,
) -> None:
    """Train a tree head and save it."""
    loaded = _load(options, out, chains=False)

    def bind(shape: Shape) -> Any:
        return loaded.accelerate(loaded.selection.recipe, tree=shape)

    requests = _requests(loaded, prompt, prompts, options.seed)
    found = train_tree(bind, requests, depth, nodes, steps, seed=options.seed)
    found.head.save(out)
    document = {
        "out": str(out),
        "nodes": found.num_nodes,
        "accepted": found.accepted,
        "loss": found.loss,
    }
    _report(
        options,
        document,
        f"{out}: for --tree c2t:head={out}",
        [
            ("drafted nodes", found.num_nodes),
            ("accepted", format_percent(found.accepted)),
            ("loss", f"{found.loss:.3f}"),
        ],
    )


def judge(
    options: ModelOptions,
    out: Path,
    prompt: list[str] | None,
    prompts: int,
    tail: int,
    max_new_tokens: int,
    steps: int,
) -> None:
    """Train a judge and save it."""
    loaded = _load(options, out)

    def bind(verifier: Any) -> Any:
        return loaded.accelerate(loaded.selection.recipe, verifier=verifier)

    requests = _requests(loaded, prompt, prompts, options.seed)
    found = train_judge(bind, requests, same_end(tail), max_new_tokens, steps)
    found.head.save(out)
    document = {
        "out": str(out),
        "tokens": found.num_tokens,
        "harmless": found.harmless,
        "recall": found.recall,
        "saved": found.saved,
        "threshold": found.head.threshold,
    }
    _report(
        options,
        document,
        f'{out}: for accelerate(model, "judge", drafter=..., judge="{out}")',
        [
            ("refused tokens", found.num_tokens),
            ("harmless", format_percent(found.harmless)),
            ("harmful held-out ones refused", format_percent(found.recall)),
            ("harmless held-out ones accepted", format_percent(found.saved)),
            ("threshold", f"{found.head.threshold:.3f}"),
        ],
    )


def ngrams(options: ModelOptions, out: Path, width: int, batch: int) -> None:
    """Save the model's table of next tokens."""
    selected = select(options)
    check_writable("--out", out)
    table = BigramTable.of(load(options, selected).model, width, batch)
    table.save(out)
    count, width = table.tokens.shape
    _report(
        options,
        {"out": str(out), "tokens": count, "width": width},
        f"{out}: for --recipe ngrammys --set table={out}",
        [("tokens", count), ("next tokens of each", width)],
    )


def _load(options: ModelOptions, out: Path, chains: bool = True) -> LoadedModels:
    """Load the models. Raises ValueError for a recipe without a draft model, or without chains."""
    check_writable("--out", out, (".safetensors",))
    loaded = load(options, select(options))
    recipe = recipes.get(loaded.selection.recipe)
    if not recipe.takes_drafter or (chains and recipe.execution.walk != LINEAR):
        what = "chains with a draft model" if chains else "with a draft model"
        raise ValueError(
            f"recipe {recipe.name!r} does not draft {what}, so it has no tokens to train on; give "
            f"--recipe {RECIPE if chains else 'coupled'}"
        )
    return loaded


def _requests(
    loaded: LoadedModels, prompt: list[str] | None, prompts: int, seed: int
) -> list[dict[str, Any]]:
    """Given prompts, or bundled examples of another seed than `mmspec bench` takes."""
    return [dict(one) for one in workload(loaded, prompt, prompts, 1, seed + 1).timed]


def _report(
    options: ModelOptions, document: dict[str, Any], title: str, pairs: list[tuple[str, Any]]
) -> None:
    if options.json:
        print_json(document)
        return
    console().print(title, markup=False)
    console().print()
    print_pairs(pairs)
