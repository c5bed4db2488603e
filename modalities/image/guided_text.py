"""Guidance of `generate()` by transformers' names, as inputs of the guided reader.

transformers reads the unconditional prompt in a processor with a cache of its own, which cannot be
rolled back. Both prompts are read as one doubled batch here; the law is the same.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import UnbatchedClassifierFreeGuidanceLogitsProcessor as Processor

from mmspec.targets.guidance import NEGATIVE, SCALE

IDS, MASK = "negative_prompt_ids", "negative_prompt_attention_mask"


def of_call(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of `generate` without guidance, and the guidance as a reader's inputs.

    Without `negative_prompt_ids` the last token of the prompt is the unconditional one.
    """
    rest = {n: value for n, value in arguments.items() if n not in (SCALE, IDS, MASK)}
    prompt, negative = arguments.get("input_ids"), arguments.get(IDS)
    return rest, _inputs(arguments.get(SCALE), prompt, negative, arguments.get(MASK))


def of_hook(arguments: Mapping[str, Any], ids: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    """As `of_call`, of what `generate(custom_generate=...)` hands over behind a prompt (B, L)."""
    processors = arguments.get("logits_processor") or []
    guides = [one for one in processors if type(one) is Processor]
    if not guides:
        return dict(arguments), {}
    config = copy.copy(arguments["generation_config"])
    config.guidance_scale = None
    rest = [one for one in processors if type(one) is not Processor]
    said: Any = guides[0].unconditional_context
    negative, mask = said["input_ids"], said["attention_mask"]
    guided = _inputs(guides[0].guidance_scale, ids, negative, mask)
    return {**arguments, "logits_processor": rest, "generation_config": config}, guided


def _inputs(
    scale: float | None, prompt: Tensor | None, negative: Tensor | None, mask: Tensor | None
) -> dict[str, Any]:
    """What a guided request has among its inputs; nothing without a scale."""
    if scale is None or scale == 1 or prompt is None:
        return {}
    if negative is None:
        negative, mask = prompt[:, -1:], None
    ids = {"input_ids": negative}
    return {SCALE: scale, NEGATIVE: ids if mask is None else {**ids, "attention_mask": mask}}
