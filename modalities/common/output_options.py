"""What a request of text generation returns beside its tokens, and the run that records it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from mmspec.modalities.common.tokens import BoundTokens, first_id, pad_rows, run_rounds
from mmspec.modality import Call, Loop
from mmspec.targets.readers.backbone import Backbone
from mmspec.targets.tokens.outcome import OutcomeRecorder, RequestOutcome
from mmspec.targets.tokens.turns import check_capacity, count_prompt_slots


@dataclass(frozen=True)
class OutputOptions:
    """Outputs that a request requires in addition to tokens."""

    cache: Any  # of the user
    returns_cache: bool
    scores: bool
    logits: bool
    normalised: bool  # whether scores are log probabilities (`renormalize_logits`)

    @classmethod
    def from_config(cls, config: GenerationConfig, cache: Any, bound: BoundTokens) -> OutputOptions:
        """Read the options of a config. Raises ValueError for scores that are not computed."""
        scores, logits = bool(config.output_scores), bool(config.output_logits)
        if (scores or logits) and bound.gate is not None:
            raise ValueError(
                "output_scores and output_logits need a recipe that scores every token, and the "
                f"gate of {bound.recipe.name or 'this one'} skips some; choose another"
            )
        returned = cache is not None or bool(config.return_dict_in_generate)
        returned = returned and isinstance(bound.backbone, Backbone)
        normalised = bool(config.do_sample and config.renormalize_logits)
        return cls(cache, returned, scores, logits, normalised)

    @property
    def extra(self) -> list[str]:
        """Outputs that need a run of this request alone."""
        wanted = {
            "past_key_values": self.returns_cache,
            "output_scores": self.scores,
            "output_logits": self.logits,
        }
        return [name for name, is_wanted in wanted.items() if is_wanted]

    def run(
        self, call: Call, ids: Tensor, config: GenerationConfig, loop: Loop, streamer: Any = None
    ) -> tuple[Tensor, RequestOutcome]:
        """Run a request; returns sequences (B, L + T) and the other outputs."""
        request: Any = call.request
        target: Any = call.parts.target
        if self.cache is not None:
            slots = count_prompt_slots(request.inputs, request.past)
            check_capacity(self.cache, slots + request.max_new_tokens - 1)
        recorder = None
        if self.returns_cache or self.scores or self.logits:
            recorder = OutcomeRecorder(target, self.scores or self.logits)
            call = replace(call, parts=replace(call.parts, target=recorder))
        tokens, _ = run_rounds(call, ids, loop, streamer)
        rows = pad_rows(tokens, first_id(config.pad_token_id, config.eos_token_id))
        sequences = torch.cat((ids, ids.new_tensor(rows)), 1)
        if recorder is None:
            return sequences, RequestOutcome()
        ending = recorder.finish(rows, self.cache, self.returns_cache)
        scores = ending.scores
        if scores is not None and self.normalised:
            scores = tuple(step.log_softmax(-1) for step in scores)
        return sequences, replace(
            ending,
            scores=scores if self.scores else None,
            logits=ending.logits if self.logits else None,
        )
