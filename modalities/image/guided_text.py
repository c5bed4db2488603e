"""Guidance of `generate()` by transformers' names, as inputs of the guided reader.

transformers reads the unconditional prompt in a processor with a cache of its own, which cannot be
rolled back. Both prompts are read as one doubled batch here; the distribution is the same.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import GenerationConfig
from transformers import UnbatchedClassifierFreeGuidanceLogitsProcessor as Processor

from mmspec import _hf
from mmspec.errors import check_number
from mmspec.targets.readers.guidance import NEGATIVE, SCALE

IDS, MASK, LOGITS = "negative_prompt_ids", "negative_prompt_attention_mask", "output_logits"


def of_call(model: Any, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of `generate` without guidance, and the guidance as a reader's inputs.

    What is not said, the configurations say. Without `negative_prompt_ids` the last token of the
    prompt is the unconditional one.
    """
    rest = {name: value for name, value in arguments.items() if name not in (IDS, MASK)}
    said = {name: arguments[name] for name in (SCALE, LOGITS) if name in arguments}
    if said.get(SCALE) is not None:
        check_number(SCALE, said[SCALE], example=3)
    config, prompt = arguments.get("generation_config"), arguments.get("input_ids")
    config = config if isinstance(config, GenerationConfig) else None
    config = _hf.merge_config(model, config, said)
    if prompt is None and arguments.get("inputs_embeds") is None:
        return rest, {}  # refused for lack of a prompt
    scale, negative = config.guidance_scale, arguments.get(IDS)
    guided = _inputs(scale, config, prompt, negative, arguments.get(MASK))
    return {**rest, SCALE: 1.0}, guided


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
    prompt = ids if ids.shape[1] else None
    guided = _inputs(guides[0].guidance_scale, config, prompt, negative, mask)
    return {**arguments, "logits_processor": rest, "generation_config": config}, guided


def _inputs(
    scale: float | None,
    config: GenerationConfig,
    prompt: Tensor | None,
    negative: Tensor | None,
    mask: Tensor | None,
) -> dict[str, Any]:
    """What a guided request has among its inputs; nothing without a scale."""
    if scale is None or scale == 1:
        return {}
    if config.output_logits:
        raise ValueError(
            f"output_logits are the prompt's unguided ones, but {SCALE}={scale} reads both prompts "
            "as one; ask for output_scores, which are guided, or drop one of the two"
        )
    if negative is None:
        if prompt is None:
            raise ValueError(
                f"{SCALE}={scale} takes the last token of the prompt for the unconditional one, "
                "and inputs_embeds have no tokens; give input_ids, or drop the scale"
            )
        negative, mask = prompt[:, -1:], None
    ids = {"input_ids": negative}
    return {SCALE: scale, NEGATIVE: ids if mask is None else {**ids, "attention_mask": mask}}
