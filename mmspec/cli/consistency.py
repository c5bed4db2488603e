"""`mmspec train cllm`: train a target so that Jacobi iteration decodes it in fewer steps."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

from mmspec.cli.bench import workload
from mmspec.cli.models import LoadedModels, load, select
from mmspec.cli.options import ModelOptions
from mmspec.cli.output import console, print_json, print_pairs, show_progress
from mmspec.registry import ZOO
from mmspec.training.cllm import record_trajectories, train_consistency
from mmspec.training.fitting import TrainingRun
from mmspec.zoo import path

RECIPE = "cllm"
HELD_OUT = 4  # every fourth request measures
WEIGHTS = (".safetensors", ".bin", ".index.json", ".gguf")  # not copied from the old target


def run(
    options: ModelOptions,
    out: Path,
    prompt: list[str] | None,
    prompts: int,
    block: int,
    max_new_tokens: int,
    repeats: int,
    steps: int,
    rate: float,
) -> None:
    """Train a target on its own answers and write it to a new folder."""
    selected = select(options)
    source = path(selected.model) if selected.model.startswith(ZOO) else Path(selected.model)
    _check(source, out)
    loaded = load(options, selected)
    requests = [dict(one) for one in workload(loaded, prompt, prompts, 1, options.seed + 1).timed]
    held_out, trained_on = requests[::HELD_OUT], requests
    if len(requests) > 1:
        trained_on = [one for at, one in enumerate(requests) if at % HELD_OUT]
    reader = loaded.accelerate(RECIPE).session.bound.backbone
    before = _measure(loaded, held_out, max_new_tokens)
    with show_progress(options.json) as bar:
        sizes = (block, max_new_tokens, repeats, tuple(reader.visual_ids), options.seed)
        trajectories = record_trajectories(loaded.model, trained_on, *sizes)
        progress = TrainingRun(
            options.seed,
            progress=lambda stage, step, total, loss: bar(stage, step, total, f"loss {loss:.3f}"),
        )
        found = train_consistency(loaded.model, trajectories, steps, rate, run=progress)
    _save(loaded, source, out)
    tenth = max(1, len(found.losses) // 10)
    document: dict[str, Any] = {
        "out": str(out),
        "trajectories": len(trajectories),
        "iterations": fmean(len(one.states) - 1 for one in trajectories),
        "loss before": fmean(found.losses[:tenth]),
        "loss": fmean(found.losses[-tenth:]),
        "tokens per call before": before,
        "tokens per call": _measure(loaded, held_out, max_new_tokens),
    }
    if options.json:
        print_json(document)
        return
    console().print(f"{out}: for --model {out} --recipe {RECIPE}; a new model", markup=False)
    console().print()
    print_pairs([(name, value) for name, value in document.items() if name != "out"])


def _check(source: Path, out: Path) -> None:
    """Refuse a folder with content, and a target that is no folder. Raises ValueError."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out} exists and is not empty; give a new folder")
    if not source.is_dir():
        raise ValueError(
            f"{source} is not a folder; download it first (`hf download ... --local-dir DIR`), as "
            "its processor and its configuration are copied into the new one"
        )


def _measure(loaded: LoadedModels, requests: list[Any], max_new_tokens: int) -> float:
    """New tokens per forward of the target by Jacobi iteration, greedily."""
    fast = loaded.accelerate(RECIPE)
    settings = {"do_sample": False, "max_new_tokens": max_new_tokens}
    stats = [fast.generate(**{**one, **settings}).stats for one in requests]
    tokens: int = sum(one.num_new_tokens for one in stats)
    calls: int = sum(one.target_calls for one in stats)
    return tokens / calls


def _save(loaded: LoadedModels, source: Path, out: Path) -> None:
    """The trained weights, with the configuration, tokenizer and processor of the old folder."""
    out.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(WEIGHTS) and file.name != "README.md":
            shutil.copyfile(file, out / file.name)
    loaded.model.save_pretrained(out)
