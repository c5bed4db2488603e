"""`mmspec train datastore`: texts that outputs will resemble, sorted for recipe rest (REST)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmspec import registry
from mmspec.cli.bench import workload
from mmspec.cli.models import LoadedModels, check_writable, load, select
from mmspec.cli.options import ModelOptions
from mmspec.cli.output import console, print_json, print_pairs, show_progress
from mmspec.drafters.lookup.datastore import Datastore
from mmspec.training.conversations import read_questions

RECIPE = "rest"
EXAMPLES = 64


def run(
    options: ModelOptions,
    out: Path,
    data: Path | None,
    prompt: list[str] | None,
    prompts: int | None,
) -> None:
    """Sort the answers of a data set, or the model's own outputs, and save them."""
    selected = select(options)
    if data is not None and prompt is not None:
        raise ValueError("--data and --prompt are two sources of texts; drop one")
    if data is not None and prompts is not None:
        raise ValueError(f"--prompts={prompts} counts examples, and --data is read whole; drop one")
    check_writable("--out", out, (".npz",))
    loaded = load(options, selected)
    if data is not None:
        sequences = _read_answers(loaded, data)
    else:
        sequences = _generate(loaded, prompt, prompts or EXAMPLES, options)
    store = Datastore.of(sequences)
    store.save(out)
    document = {"out": str(out), "texts": len(sequences), "tokens": sum(map(len, sequences))}
    if options.json:
        print_json(document)
        return
    console().print(f"{out}: for --recipe {RECIPE} --set datastore={out}", markup=False)
    console().print()
    print_pairs([(name, value) for name, value in document.items() if name != "out"])


def _read_answers(loaded: LoadedModels, data: Path) -> list[list[int]]:
    """The answers of a data set, as tokens. Raises ValueError for a question without one."""
    questions = read_questions(data)
    missing = next((one.place for one in questions if one.answer is None), None)
    if missing is not None:
        raise ValueError(
            f"{missing} has no answer to keep; give data with answers, or drop --data: the model "
            "answers --prompt itself"
        )
    owner = loaded.selection.owner
    teacher = registry.training_data(owner).teacher(loaded.selection.model, loaded.model)
    return [teacher.tokens(one.answer) for one in questions if one.answer is not None]


def _generate(
    loaded: LoadedModels, prompt: list[str] | None, prompts: int, options: ModelOptions
) -> list[list[int]]:
    """The model's outputs for prompts, or for examples of another seed than `mmspec bench` takes.

    Raises ValueError for outputs that are not rows of token ids.
    """
    work = workload(loaded, prompt, prompts, 1, options.seed + 1)
    found: list[list[int]] = []
    with show_progress(options.json) as bar:
        for done, request in enumerate(work.timed, 1):
            rows: Any = work.plain.run(request, options.seed).values
            if rows is None:
                raise ValueError(
                    f"the outputs of {loaded.selection.model} are not text; give --data"
                )
            found += rows
            bar("generate", done, len(work.timed))
    return found
