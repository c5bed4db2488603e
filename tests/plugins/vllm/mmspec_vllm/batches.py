"""vLLM's configuration and table of rows, as far as a proposer sees them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

VOCABULARY = 20
PLACEHOLDER = 7


def config(
    draft_length: int | None = 4,
    options: Any = None,
    text_length: int = 400,
    schedule: Any = None,
    vocabulary: int = VOCABULARY,
) -> Any:
    """The fields of a VllmConfig that proposers read; the slow test reads a real one."""
    model = SimpleNamespace(
        hf_config=SimpleNamespace(image_token_id=PLACEHOLDER),
        max_model_len=text_length,
        get_vocab_size=lambda: vocabulary,
    )
    speculative = SimpleNamespace(
        num_speculative_tokens=draft_length, num_speculative_tokens_per_batch_size=schedule
    )
    return SimpleNamespace(
        speculative_config=speculative,
        model_config=model,
        scheduler_config=SimpleNamespace(max_num_seqs=6),
        additional_config={} if options is None else {"mmspec": options},
    )


@dataclass
class Batch:
    """Rows as vLLM keeps them: values beyond a row's length are left from earlier rows."""

    rows: list[list[int]] = field(default_factory=list)
    table: Any = field(default_factory=lambda: np.full((6, 400), 3, dtype=np.int32))

    def step(self, proposer: Any, sampled: Sequence[Sequence[int]]) -> list[list[int]]:
        """Give each row its new tokens, and call the proposer as vLLM does."""
        for row, tokens in zip(self.rows, sampled, strict=True):
            row += tokens
        counts = np.zeros(6, dtype=np.int32)
        for index, row in enumerate(self.rows):
            self.table[index, : len(row)] = row
            counts[index] = len(row)
        drafts: list[list[int]] = proposer.propose(
            [list(tokens) for tokens in sampled], counts, self.table, slot_mappings=None
        )
        return drafts


def play(proposer: Any, steps: int, seed: int) -> Any:
    """Requests that join, leave, move, pause and repeat one another; yields rows and drafts."""
    rng, batch = random.Random(seed), Batch()
    paused: list[list[int]] = []
    ended: list[list[int]] = []
    for _ in range(steps):
        event = rng.random()
        if event < 0.25 and len(batch.rows) < 6:
            prompt = [rng.choice((0, 1, 2, PLACEHOLDER)) for _ in range(rng.randint(1, 30))]
            earlier = rng.choice(ended)[:60] if ended and rng.random() < 0.4 else prompt
            batch.rows.append(list(earlier))
        elif event < 0.35 and batch.rows:
            ended.append(batch.rows.pop(rng.randrange(len(batch.rows))))
        elif event < 0.45 and batch.rows:
            paused.append(batch.rows.pop(rng.randrange(len(batch.rows))))
        elif event < 0.6 and paused and len(batch.rows) < 6:
            batch.rows.insert(0, paused.pop(rng.randrange(len(paused))))
        if rng.random() < 0.3:
            rng.shuffle(batch.rows)
        room = [340 - len(row) for row in batch.rows]
        sampled = [
            [rng.randrange(3) for _ in range(rng.randint(0, 5))] if one > 0 else [] for one in room
        ]
        drafts = batch.step(proposer, sampled)
        yield batch.rows, sampled, drafts
