"""Speculate on whole sentences: a small model writes them, the target scores them (SpecReason).

    python demos/reasoning.py                      # the bundled LLaVA and its draft model
    python demos/reasoning.py --model qwen2.5-vl

Pan et al. 2025, "SpecReason". The small model writes the next sentence; the target reads it in one
forward, and its score is the geometric mean of the target's token probabilities. From a threshold
on it is kept as it is, otherwise the target writes the sentence itself, here with the small model
as its drafter. Lossy: a kept sentence need not be the target's. A threshold above 1 keeps none and
is the target's own text; 0 keeps all and is the small model's. The paper's score is a grade that
the target is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import mmspec
from mmspec import zoo
from mmspec.cli.output import silence_libraries
from mmspec.targets.tokens.context import append_tokens
from mmspec.zoo import language

console = Console(highlight=False)
THRESHOLDS = (0.0, 0.1, 0.2, 0.4, 0.8, 2.0)
Inputs = Mapping[str, Any]


@dataclass
class Answer:
    """A text of sentences, and what it cost."""

    tokens: list[int]
    num_kept: int = 0  # sentences of the small model
    num_steps: int = 0
    target_calls: int = 0  # forwards of the target, prompts included


def main(
    model: Annotated[str, typer.Option(help="A target of `mmspec zoo list`.")] = "llava",
    scenes: Annotated[int, typer.Option(min=1, help="Number of images.")] = 4,
    max_new_tokens: int = 64,
    seed: int = 0,
) -> None:
    """Compare thresholds: sentences kept, target calls, and the share of the target's sentences."""
    silence_libraries()
    torch.set_num_threads(1)
    target, processor = zoo.load(model), zoo.processor(model)
    small = zoo.load(f"{zoo.info(model).name}-drafter")
    fast = mmspec.accelerate(target, "coupled", drafter=small)
    requests = [
        processor(
            text=[language.format_prompt(processor, one.prompt)],
            images=[one.image],
            return_tensors="pt",
        )
        for one in language.examples(scenes, "held-out", seed, kind="caption")
    ]
    own = [write(fast, small, one, processor, 2.0, max_new_tokens) for one in requests]
    table = Table(
        "threshold", "sentences kept", "target calls", "sentences of the target", box=None
    )
    for threshold in THRESHOLDS:
        found = [write(fast, small, one, processor, threshold, max_new_tokens) for one in requests]
        table.add_row(*_summary(threshold, found, own, processor))
    console.print(table)


def write(
    fast: Any, small: Any, inputs: Inputs, processor: Any, threshold: float, max_new_tokens: int
) -> Answer:
    """Write an answer sentence by sentence; greedy."""
    ends, answer = _ends_of(fast.model), Answer([])
    stops = [*ends, processor.tokenizer.encode(".", add_special_tokens=False)[-1]]
    settings = {"do_sample": False, "eos_token_id": stops}
    while len(answer.tokens) < max_new_tokens and not {*ends} & {*answer.tokens}:
        given = append_tokens(None, inputs, torch.tensor([answer.tokens], dtype=torch.int64))
        room = {**settings, "max_new_tokens": max_new_tokens - len(answer.tokens)}
        length = given["input_ids"].shape[1]
        step = small.generate(**given, **room)[:, length:]
        is_kept = threshold <= 0
        if 0 < threshold <= 1:
            answer.target_calls += 1
            is_kept = score_step(fast.model, given, step) >= threshold
        if not is_kept:
            out = fast.generate(**given, **room)
            step = out.sequences[:, length:]
            answer.target_calls += 1 + out.stats.target_calls
        is_sentence = stops[-1] in step[0]
        answer.num_kept += is_kept and is_sentence
        answer.num_steps += is_sentence
        answer.tokens += step[0].tolist()
    return answer


@torch.no_grad()
def score_step(target: Any, inputs: Inputs, step: Tensor) -> float:  # step (1, n)
    """The geometric mean of the target's probabilities of the tokens of a step."""
    count = step.shape[1]
    logits = target(**append_tokens(None, inputs, step)).logits[:, -count - 1 : -1]
    chosen = logits.float().log_softmax(-1).gather(2, step[..., None])
    return float(chosen.mean().exp())


def _ends_of(model: Any) -> list[int]:
    ends = model.generation_config.eos_token_id
    return [ends] if isinstance(ends, int) else list(ends or ())


def _summary(
    threshold: float, found: list[Answer], own: list[Answer], processor: Any
) -> tuple[str, ...]:
    """A row of the table."""
    kept, steps = sum(one.num_kept for one in found), sum(one.num_steps for one in found)
    calls = sum(one.target_calls for one in found)
    same = total = 0
    for mine, theirs in zip(found, own, strict=True):
        written, wanted = (
            processor.tokenizer.decode(one.tokens, skip_special_tokens=True).split(".")
            for one in (mine, theirs)
        )
        same += sum(one in wanted for one in written if one.strip())
        total += sum(bool(one.strip()) for one in written)
    return f"{threshold:g}", f"{kept} of {steps}", str(calls), f"{same / total:.0%}"


if __name__ == "__main__":
    typer.run(main)
