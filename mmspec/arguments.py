"""The arguments of `generate`: which are inputs, which are settings, and what is returned."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

# what `generate` takes beside a model's inputs and generation settings
OWN = (
    *("seed", "row_ids", "streamer", "drafter_inputs", "tokenizer"),
    *("generation_config", "stopping_criteria", "logits_processor", "prefix_allowed_tokens_fn"),
)
# inputs that some forwards take under `**kwargs`, or that a text model must be able to refuse
MODEL_INPUTS = {
    "pixel_values",
    "pixel_values_videos",
    "input_ids",
    "attention_mask",
    "inputs_embeds",
    "token_type_ids",
    "mm_token_type_ids",
}
# what transformers' own loop hands to a custom_generate callable, and this one makes itself
LOOP_ARGUMENTS = {
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "output_hidden_states",
    "output_attentions",
}
# what transformers prepares from the pictures
PREPARED = ("position_ids", "mm_encoder_outputs")
SAMPLED = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")


def fresh_seed() -> int:
    """A seed from torch's own generator: `torch.manual_seed` reproduces a call without one."""
    return int(torch.randint(2**62, ()))


def sampled(settings: dict[str, Any]) -> dict[str, Any]:
    """`do_sample` follows from a sampling setting; temperature 0 means greedy."""
    if settings.get("temperature") == 0:
        settings = {k: v for k, v in settings.items() if k not in SAMPLED}
        return {**settings, "do_sample": False}
    if "do_sample" not in settings and any(settings.get(name) is not None for name in SAMPLED):
        return {**settings, "do_sample": True}
    return settings


def padded_sequences(ids: Tensor, tokens: Sequence[Sequence[int]], pad: int) -> Tensor:
    """Prompts (B, L) and new tokens as `generate()` returns them: finished rows padded."""
    width = max(len(row) for row in tokens)
    new = [list(row) + [pad] * (width - len(row)) for row in tokens]
    return torch.cat((ids, torch.tensor(new, dtype=ids.dtype, device=ids.device)), 1)


def first(*candidates: Any) -> int:
    """The first id that is set; of a list of ids, its first."""
    for value in candidates:
        if isinstance(value, list | tuple):
            value = value[0] if value else None
        if value is not None:
            return int(value)
    return 0


def unknown_message(given: Sequence[str], known: Sequence[str], where: str) -> str:
    """One sentence on a misspelt keyword: what was given, the nearest, the known ones."""
    near = get_close_matches(given[0], known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown keyword {', '.join(given)} for {where}{hint} known: {', '.join(known)}"
