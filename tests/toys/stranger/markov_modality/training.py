"""How the checkpoints of this package are made: a table, and a few days of watching it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from markov_modality.model import MarkovChain
from mmspec import zoo
from mmspec.modality import Entry
from mmspec.training.fitting import TrainingProgress

WEATHER = ((0.7, 0.2, 0.1), (0.3, 0.4, 0.3), (0.2, 0.4, 0.4))
DAYS = 200
ABOUT = (
    "State 0 is sun, 1 is clouds, 2 is rain; every row of the table is the distribution of the "
    "next day."
)
NOTES = "`off` is the mean total variation between the table's rows and those of the weather.\n"
HELD_OUT = 0  # the distribution is known, nothing need be sampled


def train(
    entry: Entry, folder: Path, steps: int | None, seed: int, progress: TrainingProgress
) -> dict[str, Any]:
    """Write the chain itself, or what its drafter counted in `steps` days."""
    if entry.target is None:
        MarkovChain(torch.tensor(WEATHER)).save_pretrained(folder)
        return {"states": len(WEATHER)}
    table = MarkovChain.from_pretrained(zoo.path(entry.target)).table
    days, state = min(steps or DAYS, DAYS), 0
    noise, seen = torch.Generator().manual_seed(seed), torch.ones_like(table)
    for day in range(days):
        following = int(torch.multinomial(table[state], 1, generator=noise))
        seen[state, following] += 1
        state = following
        progress("watch", day + 1, days, 0.0)
    MarkovChain(seen).save_pretrained(folder)
    return {"days": days}


def measure(entry: Entry, folder: Path, count: int) -> dict[str, float]:
    """How far what was written is from the weather."""
    off = MarkovChain.from_pretrained(folder).table - torch.tensor(WEATHER)
    return {"off": round(float(off.abs().sum(-1).mean() / 2), 3)}
