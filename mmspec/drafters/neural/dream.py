"""DREAM heads as a sort of draft model: they continue a target's states as feature heads do."""

from __future__ import annotations

from dataclasses import replace

import torch

from mmspec.drafters.neural.feature_head import state_head
from mmspec.models.heads.dream import DreamHead


@torch.no_grad()
def _open_gates(head: DreamHead, seed: int) -> None:
    """Let a random head hear the target, which an untrained one does not."""
    for name, weight in head.named_parameters():
        if name.endswith("_gate"):
            weight.fill_(1.0)


DREAM_HEAD = replace(state_head("DREAM head", DreamHead), fill=_open_gates)
