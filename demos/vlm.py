"""Speculative decoding of a vision-language model, seen from inside.

    python demos/vlm.py                      # the bundled LLaVA and its draft models
    python demos/vlm.py --model qwen2.5-vl   # the bundled Qwen2.5-VL

Green words were drafted and accepted, plain ones are the target's own. The text is as without
speculation; what changes is how many calls of the target it took, and how much the draft model saw.
"""

from __future__ import annotations

from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import mmspec
from mmspec import zoo
from mmspec.bench import aggregate
from mmspec.cli.inputs import quiet
from mmspec.stats import Stats
from mmspec.zoo import language

console = Console(highlight=False)
Inputs = dict[str, Any]


def main(
    model: Annotated[str, typer.Option(help="A target of `mmspec zoo list`.")] = "llava",
    scenes: Annotated[int, typer.Option(min=2, help="How many pictures.")] = 4,
    max_new_tokens: int = 64,
    seed: int = 0,
) -> None:
    """Plain against speculative decoding, three ways of seeing, and a control."""
    quiet()
    torch.set_num_threads(1)  # models this small gain nothing from more
    entry = zoo.info(model)
    target, processor = zoo.load(model), zoo.processor(model)
    sighted, blind = (zoo.load(f"{entry.name}-{kind}") for kind in ("drafter", "text-drafter"))
    examples = language.examples(scenes, "held-out", seed, kind="caption")
    requests = [_request(processor, example) for example in examples]
    ways = {
        "sees the picture": mmspec.accelerate(target, "coupled", drafter=sighted),
        "reads text only": mmspec.accelerate(target, "spd-mllm", drafter=blind),
        "copies the text so far": mmspec.accelerate(target, "prompt-lookup"),
    }
    plain = mmspec.accelerate(target, "plain")
    fast = ways["sees the picture"]
    fast.generate(**requests[0], max_new_tokens=8)  # warm-up
    for example, inputs in zip(examples, requests, strict=True):
        console.print(f"[bold]{example.prompt}[/bold]")
        console.print(_coloured(fast, inputs, processor, max_new_tokens))
        _same(plain, fast, inputs, max_new_tokens)
    rows = [(name, _run(way, requests, max_new_tokens)) for name, way in ways.items()]
    others = [
        replace_picture(mine, other)
        for mine, other in zip(requests, requests[1:] + requests[:1], strict=True)
    ]
    rows.append(("sees the wrong picture", _run(fast, requests, max_new_tokens, others)))
    _table(rows)


def replace_picture(mine: Inputs, other: Inputs) -> Inputs:
    """What the draft model gets instead: the picture of another request."""
    names = ("pixel_values", "image_grid_thw")
    return {name: other[name] for name in names if name in mine}


def _request(processor: Any, example: language.Example) -> Inputs:
    text = language.format_prompt(processor, example.prompt)
    return dict(processor(text=[text], images=[example.image], return_tensors="pt"))


def _coloured(fast: Any, inputs: Inputs, processor: Any, room: int) -> Text:
    """The answer, word by word: accepted drafts in green."""
    line = Text()
    skipped = set(processor.tokenizer.all_special_ids)
    for kept in fast.stream(**inputs, max_new_tokens=room, do_sample=False):
        for place, token in enumerate(kept.tokens[0]):
            if token in skipped:
                continue
            word = processor.tokenizer.decode([token])
            space = "" if not line or word in ".,:;!?" else " "
            line.append(space + word, style="green" if place < kept.accepted[0] else "")
    return line


def _same(plain: Any, fast: Any, inputs: Inputs, room: int) -> None:
    """Both ways, timed."""
    seconds, answers = [], []
    for way in (plain, fast):
        start = perf_counter()
        answers.append(way.generate(**inputs, max_new_tokens=room, do_sample=False))
        seconds.append(perf_counter() - start)
    same = answers[0].sequences.tolist() == answers[1].sequences.tolist()
    calls = [answer.stats.target_calls for answer in answers]
    console.print(
        f"target calls {calls[0]} -> {calls[1]}, milliseconds {1e3 * seconds[0]:.0f} -> "
        f"{1e3 * seconds[1]:.0f}, {'the same' if same else 'ANOTHER'} text\n",
        style="dim",
    )


def _run(
    way: Any, requests: list[Inputs], room: int, others: list[Inputs] | None = None
) -> list[Stats]:
    found = []
    for index, inputs in enumerate(requests):
        given = None if others is None else others[index]
        out = way.generate(**inputs, drafter_inputs=given, max_new_tokens=room, do_sample=False)
        found.append(out.stats)
    return found


def _table(rows: list[tuple[str, list[Stats]]]) -> None:
    table = Table("the draft model ...", "tokens per target call", "acceptance length", box=None)
    for name, stats in rows:
        calls = f"{aggregate.tokens_per_target_call(stats):.2f}"
        table.add_row(name, calls, f"{aggregate.mean_acceptance_length(stats):.2f}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
