"""On-policy distillation of a small text model: DistillSpec.

    mmspec train distillspec --target llava --drafter small --data questions.jsonl --out drafter

Zhou et al. 2024, "DistillSpec: improving speculative decoding via knowledge distillation". The
draft model samples a response of its own, as long as that of the example, and the loss is the total
variation of its distribution and the target's, averaged over these tokens: 1 - TV is the
probability that a token is accepted. Sampled tokens carry no gradient. A model that writes nothing
sensible yet should be trained with `spd-mllm` first. Reconstructed: the responses are all its own,
where the paper mixes in fixed ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmspec.targets.memory import build_block
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import append_tokens
from mmspec.training.heads import TrainingExample
from mmspec.training.losses import total_variation
from mmspec.training.small_model import SmallModelTraining, TrainableSmallModel, draft_prompt


def on_policy_loss(
    target: Reader, head: TrainableSmallModel, example: TrainingExample
) -> Tensor:  # ()
    """TV of the draft model and the target on a response that the draft model samples.

    Tokens are drawn by torch's global generator, which the trainer seeds for every step.
    """
    reader = target.make_reader(head.language_model)
    prompt = draft_prompt(target, head, example.inputs, reader)
    tokens = sample_response(reader, prompt, example.tokens.shape[1], tuple(target.visual_ids))
    own = head.logits(prompt, tokens, reader)
    wanted = score_response(target, example.inputs, tokens)
    width = min(own.shape[-1], wanted.shape[-1])
    real = example.tokens >= 0
    return total_variation(own[real][:, :width], wanted[real][:, :width]) / 2


@torch.no_grad()
def sample_response(
    reader: Reader, prompt: Mapping[str, Any], length: int, never: Sequence[int] = ()
) -> Tensor:  # (B, length) int64
    """Tokens drawn from a model after its prompt, at temperature 1.

    `never` are ids that are not drawn, such as placeholders of images: the target has none there.
    """

    def draw(logits: Tensor) -> Tensor:
        scores = logits.float().clone()
        scores[:, list(never)] = -torch.inf
        return torch.multinomial(scores.softmax(-1), 1)

    memory, logits, _ = reader.prefill(prompt, extra_slots=length)
    tokens = [draw(logits)]
    while len(tokens) < length:
        logits, _ = reader.read(memory, build_block(tokens[-1].tolist(), None, memory.like))
        memory.advance([1] * memory.batch)
        tokens.append(draw(logits[:, -1]))
    return torch.cat(tokens, 1)


@torch.no_grad()
def score_response(
    target: Any, inputs: Mapping[str, Any], tokens: Tensor
) -> Tensor:  # (B, T) -> (B, T, V)
    """The target's logits of tokens after its own prompt, images included."""
    count = tokens.shape[1]
    _, _, out = target.prefill(append_tokens(target, inputs, tokens), 0, scored=count + 1)
    logits: Tensor = target.divide_logits(out.logits[:, -count - 1 : -1])
    return logits


DISTILLSPEC = SmallModelTraining("nothing", loss=on_policy_loss)
