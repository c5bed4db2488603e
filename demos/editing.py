"""Write an edited text: the text before the edit is the draft (InputCopy).

    python demos/editing.py                      # the bundled LLaVA
    python demos/editing.py --model qwen2.5-vl

A picture has a caption; things in the picture get another colour, and the caption is written again.
The old caption is the draft of the new one (`hsd`, whose drafter copies a text given with the
call): after a difference the copy goes on where the last tokens occur in it. Drafts from the tokens
so far (`prompt-lookup`) and from a small model of the picture (`coupled`) are the baselines. Exact:
every text is that of plain decoding, checked here. Without an edit the old caption is the new one,
and all of it is accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Annotated, Any

import torch
import typer
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor

import mmspec
from mmspec import zoo
from mmspec.cli.output import silence_libraries
from mmspec.drafters.lookup.given_text import DRAFT
from mmspec.zoo import language
from mmspec.zoo.scene import COLOURS, Scene

console = Console(highlight=False)
EDITS = (0, 1, 2, 3)  # things of another colour
WAYS = ("prompt-lookup", "coupled", "hsd")


@dataclass
class Cost:
    """Tokens of some texts, and the target calls of one recipe for them."""

    tokens: int = 0
    calls: int = 0  # without those that read prompts
    changed: int = 0  # tokens that are not the old text's


def main(
    model: Annotated[str, typer.Option(help="A target of `mmspec zoo list`.")] = "llava",
    scenes: Annotated[int, typer.Option(min=1, help="Number of pictures.")] = 6,
    max_new_tokens: int = 96,
    seed: int = 0,
) -> None:
    """Print tokens per target call by the number of edited things."""
    silence_libraries()
    torch.set_num_threads(1)
    target, processor = zoo.load(model), zoo.processor(model)
    small = zoo.load(f"{zoo.info(model).name}-drafter")
    ways = {
        name: mmspec.accelerate(target, name, **({"drafter": small} if name == "coupled" else {}))
        for name in WAYS
    }
    found = language.examples(20 * scenes, "held-out", seed, kind="caption")
    examples = [one for one in found if len(one.scene.things) >= EDITS[-1]][:scenes]
    table = Table("things edited", "tokens changed", *WAYS, box=None)
    for edits in EDITS:
        costs = compare(ways, processor, examples, edits, max_new_tokens)
        first = costs[WAYS[0]]
        per_call = (f"{costs[name].tokens / costs[name].calls:.2f}" for name in WAYS)
        table.add_row(str(edits), f"{first.changed / first.tokens:.0%}", *per_call)
    console.print(table)


def recolour(scene: Scene, count: int) -> Scene:
    """The scene with the first `count` things in another colour; names stay distinct."""
    things = list(scene.things)
    for at in range(count):
        taken = {one.colour for one in things if one.name == things[at].name}
        free = [colour for colour in COLOURS if colour not in taken]
        things[at] = replace(things[at], colour=free[at % len(free)])
    return replace(scene, things=tuple(things))


def compare(
    ways: dict[str, Any],
    processor: Any,
    examples: list[language.Example],
    edits: int,
    max_new_tokens: int,
) -> dict[str, Cost]:
    """Costs by recipe of the captions of edited pictures.

    Raises ValueError if a text is not that of plain decoding.
    """
    plain = mmspec.accelerate(next(iter(ways.values())).model, "plain")
    settings = {"max_new_tokens": max_new_tokens, "do_sample": False}
    costs = {name: Cost() for name in ways}
    for example in examples:
        before = read(processor, example.prompt, example.image)
        size = example.image.width
        after = read(processor, example.prompt, recolour(example.scene, edits).render(size))
        old, wanted = (
            plain.generate(**one, **settings).sequences[0, one["input_ids"].shape[1] :].tolist()
            for one in (before, after)
        )
        for name, fast in ways.items():
            text = {"drafter_inputs": {DRAFT: [old]}} if name == "hsd" else {}
            out = fast.generate(**after, **settings, **text)
            new = out.sequences[0, after["input_ids"].shape[1] :].tolist()
            if new != wanted:
                raise ValueError(f"the text of {name} is not that of plain decoding")
            cost = costs[name]
            cost.tokens += len(new)
            cost.calls += out.stats.target_calls
            kept = SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
            cost.changed += len(new) - sum(block.size for block in kept)
    return costs


def read(processor: Any, prompt: str, image: Image.Image) -> dict[str, Tensor]:
    """The inputs of a prompt about an image."""
    text = language.format_prompt(processor, prompt)
    return dict(processor(text=[text], images=[image], return_tensors="pt"))


if __name__ == "__main__":
    typer.run(main)
