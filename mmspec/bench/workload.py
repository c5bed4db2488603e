"""What is asked in a benchmark: requests, and how good an answer is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mmspec.bench.players import Answer, Inputs

QUESTIONS = (
    "Write a short story about a lighthouse keeper and her dog.",
    "Explain how a bicycle stays upright.",
    "List the steps to repot a plant, one per line, and repeat them at the end.",
    "Translate into French: the weather was fine, so we walked to the harbour.",
)


@dataclass(frozen=True)
class Workload:
    """Requests of equal batch, and what `quality` gives for the answers to all of them."""

    requests: Sequence[Inputs]
    batch: int = 1
    quality: Callable[[Sequence[Answer]], float] | None = None  # None = agreement with the baseline
    metric: str = "agreement with generate()"


def from_zoo(
    processor: Any,
    device: torch.device,
    prompts: int,
    batch: int = 1,
    seed: int = 0,
    kind: Any = None,
) -> Workload:
    """DraftedCode-out scenes of the zoo; quality is the share of facts right.

    `kind` is "caption" or "question"; None takes both as they come.
    """
    from mmspec.zoo import language

    examples = language.examples(prompts, "held-out", seed, kind)
    groups = [examples[start : start + batch] for start in range(0, len(examples), batch)]
    groups = [group for group in groups if len(group) == batch]
    requests = [
        processor(
            text=[language.format_prompt(processor, example.prompt) for example in group],
            images=[example.image for example in group],
            padding=True,
            return_tensors="pt",
        ).to(device)
        for group in groups
    ]

    def quality(answers: Sequence[Answer]) -> float:
        rows = [row for answer in answers for row in answer.tokens]
        shown = [example for group in groups for example in group]
        right = asked = 0
        for example, row in zip(shown, rows, strict=True):
            text = processor.tokenizer.decode(row, skip_special_tokens=True)
            good, all_ = language.score(example, text)
            right, asked = right + good, asked + all_
        return right / max(asked, 1)

    return Workload([dict(made) for made in requests], batch, quality, "facts right")


def agreement(answers: Sequence[Answer], baseline: Sequence[Answer]) -> float:
    """Share of the baseline's tokens that come out at the same place."""
    same = total = 0
    for answer, other in zip(answers, baseline, strict=True):
        for row, wanted in zip(answer.tokens, other.tokens, strict=True):
            same += sum(a == b for a, b in zip(row, wanted, strict=False))
            total += max(len(row), len(wanted))
    return same / max(total, 1)


def random_prompt(
    vocabulary: int, length: int, device: torch.device, batch: int = 1, seed: int = 0
) -> dict[str, Any]:
    """A prompt of random token ids, for models that need no meaning."""
    noise = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, vocabulary, (batch, length), generator=noise).to(device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
