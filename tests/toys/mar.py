"""Tiny MAR models."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from mmspec.models.mar import MarConfig, MarForImageGeneration
from mmspec.targets.continuous.patches import PatchSettings

CLASSES = 5
SIZES: dict[str, Any] = {
    "side": 3,
    "channels": 2,
    "num_classes": CLASSES,
    "buffer_size": 2,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "decoder_hidden_size": 24,
    "decoder_num_hidden_layers": 2,
    "decoder_num_attention_heads": 4,
    "head_width": 16,
    "head_depth": 2,
    "base_steps": 8,
}
PLAN = PatchSettings(steps=4, guidance=2.0, head_steps=4, last_noise=True)


def mar(seed: int = 0, **sizes: Any) -> MarForImageGeneration:
    """A random model in which all parameters have an effect."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MarForImageGeneration(MarConfig(**{**SIZES, **sizes}))
        for value in model.parameters():
            value.data += 0.1 * torch.randn_like(value)
    model.train(False)
    return model


def settings(plan: PatchSettings) -> dict[str, Any]:
    """The keyword arguments of a call with the settings of a plan."""
    found = asdict(plan)
    return {
        **{k: v for k, v in found.items() if k != "schedule"},
        "guidance_schedule": plan.schedule,
    }
