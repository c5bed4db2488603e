"""Decode a vision-language model speculatively and show which tokens were drafted.

    python demos/vlm.py                      # the bundled LLaVA and its draft models
    python demos/vlm.py --model qwen2.5-vl   # the bundled Qwen2.5-VL

Green words are accepted draft tokens, the others were predicted by the target. The text is that of
plain decoding; the number of target calls depends on what the draft model is conditioned on.
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
from mmspec.bench.row import mean_acceptance_length, tokens_per_target_call
from mmspec.cli.output import silence_libraries
from mmspec.stats import Stats
from mmspec.zoo import language

console = Console(highlight=False)
Inputs = dict[str, Any]


def main(
    model: Annotated[str, typer.Option(help="A target of `mmspec zoo list`.")] = "llava",
    scenes: Annotated[int, typer.Option(min=2, help="Number of images.")] = 4,
    max_new_tokens: int = 64,
    seed: int = 0,
) -> None:
    """Compare plain and speculative decoding: three kinds of drafters, and a control."""
    silence_libraries()
    torch.set_num_threads(1)  # models this small gain nothing from more
    entry = zoo.info(model)
    target, processor = zoo.load(model), zoo.processor(model)
    multimodal, text_only = (
        zoo.load(f"{entry.name}-{kind}") for kind in ("drafter", "text-drafter")
    )
    examples = language.examples(scenes, "held-out", seed, kind="caption")
    requests = [_request(processor, example) for example in examples]
    ways = {
        "reads the image": mmspec.accelerate(target, "coupled", drafter=multimodal),
        "reads text only": mmspec.accelerate(target, "spd-mllm", drafter=text_only),
        "copies the text so far": mmspec.accelerate(target, "prompt-lookup"),
    }
    plain = mmspec.accelerate(target, "plain")
    fast = ways["reads the image"]
    fast.generate(**requests[0], max_new_tokens=8)  # warm-up
    for example, inputs in zip(examples, requests, strict=True):
        console.print(f"[bold]{example.prompt}[/bold]")
        console.print(_colour_tokens(fast, inputs, processor, max_new_tokens))
        _compare(plain, fast, inputs, max_new_tokens)
    rows = [(name, _run(way, requests, max_new_tokens)) for name, way in ways.items()]
    others = [
        replace_picture(mine, other)
        for mine, other in zip(requests, requests[1:] + requests[:1], strict=True)
    ]
    rows.append(("reads the wrong image", _run(fast, requests, max_new_tokens, others)))
    _table(rows)


def replace_picture(mine: Inputs, other: Inputs) -> Inputs:
    """Return drafter inputs with the image of another request."""
    names = ("pixel_values", "image_grid_thw")
    return {name: other[name] for name in names if name in mine}


def _request(processor: Any, example: language.Example) -> Inputs:
    text = language.format_prompt(processor, example.prompt)
    return dict(processor(text=[text], images=[example.image], return_tensors="pt"))


def _colour_tokens(fast: Any, inputs: Inputs, processor: Any, max_new_tokens: int) -> Text:
    """Return the generated text with accepted draft tokens in green."""
    line = Text()
    skipped = set(processor.tokenizer.all_special_ids)
    for round_ in fast.stream(**inputs, max_new_tokens=max_new_tokens, do_sample=False):
        for place, token in enumerate(round_.tokens[0]):
            if token in skipped:
                continue
            word = processor.tokenizer.decode([token])
            space = "" if not line or word in ".,:;!?" else " "
            line.append(space + word, style="green" if place < round_.accepted[0] else "")
    return line


def _compare(plain: Any, fast: Any, inputs: Inputs, max_new_tokens: int) -> None:
    """Time both, and compare their tokens."""
    seconds, outputs = [], []
    for way in (plain, fast):
        start = perf_counter()
        outputs.append(way.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False))
        seconds.append(perf_counter() - start)
    same = outputs[0].sequences.tolist() == outputs[1].sequences.tolist()
    calls = [output.stats.target_calls for output in outputs]
    console.print(
        f"target calls {calls[0]} -> {calls[1]}, milliseconds {1e3 * seconds[0]:.0f} -> "
        f"{1e3 * seconds[1]:.0f}, {'the same' if same else 'ANOTHER'} text\n",
        style="dim",
    )


def _run(
    fast: Any, requests: list[Inputs], max_new_tokens: int, others: list[Inputs] | None = None
) -> list[Stats]:
    found = []
    for index, inputs in enumerate(requests):
        given = None if others is None else others[index]
        inputs = {**inputs, "drafter_inputs": given, "max_new_tokens": max_new_tokens}
        found.append(fast.generate(**inputs, do_sample=False).stats)
    return found


def _table(rows: list[tuple[str, list[Stats]]]) -> None:
    table = Table("the draft model ...", "tokens per target call", "acceptance length", box=None)
    for name, stats in rows:
        calls = f"{tokens_per_target_call(stats):.2f}"
        table.add_row(name, calls, f"{mean_acceptance_length(stats):.2f}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
