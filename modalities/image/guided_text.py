"""Convert the guidance arguments of `generate()` to inputs of the guided reader.

transformers reads the unconditional prompt in a logits processor with a separate cache, which
cannot be rolled back. Here both prompts form one doubled batch; the distribution is the same.
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


def split_guidance(
    model: Any, arguments: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the arguments of `generate` into those without guidance and the reader's inputs.

    Defaults come from the generation configurations. Without `negative_prompt_ids` the last token
    of the prompt is the unconditional prompt.
    """
    rest = {name: value for name, value in arguments.items() if name not in (IDS, MASK)}
    given = {name: arguments[name] for name in (SCALE, LOGITS) if name in arguments}
    if given.get(SCALE) is not None:
        check_number(SCALE, given[SCALE], example=3)
    config, prompt = arguments.get("generation_config"), arguments.get("input_ids")
    config = config if isinstance(config, GenerationConfig) else None
    config = _hf.merge_config(model, config, given)
    if prompt is None and arguments.get("inputs_embeds") is None:
        return rest, {}  # `generate` raises the error for the missing prompt
    scale, negative = config.guidance_scale, arguments.get(IDS)
    guided = _guidance_inputs(scale, config, prompt, negative, arguments.get(MASK))
    return {**rest, SCALE: 1.0}, guided


def split_hook_guidance(
    arguments: Mapping[str, Any], ids: Tensor
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`split_guidance` for arguments of `generate(custom_generate=...)` with prompt ids (B, L)."""
    processors = arguments.get("logits_processor") or []
    guides = [one for one in processors if type(one) is Processor]
    if not guides:
        return dict(arguments), {}
    config = copy.copy(arguments["generation_config"])
    config.guidance_scale = None
    rest = [one for one in processors if type(one) is not Processor]
    context: Any = guides[0].unconditional_context
    negative, mask = context["input_ids"], context["attention_mask"]
    prompt = ids if ids.shape[1] else None
    guided = _guidance_inputs(guides[0].guidance_scale, config, prompt, negative, mask)
    return {**arguments, "logits_processor": rest, "generation_config": config}, guided


def _guidance_inputs(
    scale: float | None,
    config: GenerationConfig,
    prompt: Tensor | None,
    negative: Tensor | None,
    mask: Tensor | None,
) -> dict[str, Any]:
    """The guidance inputs of a request; empty without a scale."""
    if scale is None or scale == 1:
        return {}
    if config.output_logits:
        raise ValueError(
            f"output_logits are unguided logits of the prompt, but {SCALE}={scale} reads both "
            "prompts in one batch; use output_scores, which are guided, or drop one of the two"
        )
    if negative is None:
        if prompt is None:
            raise ValueError(
                f"{SCALE}={scale} uses the last token of the prompt as the unconditional prompt, "
                "and inputs_embeds have no tokens; give input_ids, or drop the scale"
            )
        negative, mask = prompt[:, -1:], None
    ids = {"input_ids": negative}
    return {SCALE: scale, NEGATIVE: ids if mask is None else {**ids, "attention_mask": mask}}
