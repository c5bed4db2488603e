"""Train a Falcon head by coupled sequential glancing distillation.

Gao et al. 2024, section 3. Two passes over an example, with blocks that begin at a random slot:

    pass 1   reads true tokens and the target's states
    pass 2   reads what pass 1 predicted for them, except at random slots, as many as `glance` times
             the tokens that it predicted wrongly; these read the truth (coupled: token and state)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.drafters.neural.head_prompt import HeadPrompt
from mmspec.models.heads.falcon import FalconHead, FalconHeadConfig
from mmspec.targets.readers.reader import Reader
from mmspec.training.heads import TargetOutputs, TrainingExample, check_continues, read_with_noise
from mmspec.training.losses import soft_cross_entropy
from mmspec.training.trainable import HeadTraining


def falcon_loss(
    reader: Reader,
    head: FalconHead,
    example: TrainingExample,
    noise: float = 0.1,
    weight: float = 0.1,
    glance: float = 0.5,
) -> Tensor:  # ()
    """EAGLE's loss of the states of K tokens later, in mean over both passes.

    Smooth L1 of the states and `weight` times the cross entropy against the target's distribution;
    the target's states that are read have uniform noise of +-`noise`. Reconstructed: pass 1 counts
    as well, and the share `glance`, which is that of glancing transformers (Qian et al. 2021).
    """
    read, prompt = read_with_noise(reader, head, example, noise)
    offset = int(torch.randint(head.config.block, ()))
    first = run_blocks(head, prompt, offset)
    mixed = mix_inputs(reader, head, read, prompt, first.detach(), glance)
    second = run_blocks(head, mixed, offset)
    return (
        _loss(reader, head, read, first, weight) + _loss(reader, head, read, second, weight)
    ) / 2


def run_blocks(head: FalconHead, prompt: HeadPrompt, offset: int) -> Tensor:  # (R, n, D)
    """States of K tokens later of all slots, where a block begins `offset` slots before the first.

    A slot attends to all slots of earlier blocks and of its own.
    """
    slots = torch.arange(prompt.embeds.shape[1], device=prompt.embeds.device) + offset
    blocks = slots // head.config.block
    seen = (blocks[:, None] >= blocks) & prompt.attention_mask[:, None, None]
    dtype = prompt.states.dtype
    mask = torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    inputs, _ = head.recur(head.fuse_inputs(prompt.embeds, prompt.states), None, prompt.pads)
    return head.attend(inputs, mask, prompt.positions)


def mix_inputs(
    reader: Reader,
    head: FalconHead,
    read: TargetOutputs,
    prompt: HeadPrompt,
    predicted: Tensor,
    glance: float,
) -> HeadPrompt:
    """The inputs of the second pass, from the states (R, n, D) that the first one predicted.

    Slot t reads the token and the state that slot t - K predicted, within the response.
    """
    size, length = head.config.block, read.next.shape[1]
    if length <= size:
        return prompt
    own = predicted[:, -length:-size]  # of the slots from the (K + 1)-th of the response
    tokens = reader.head(own).argmax(-1)
    asked = reader.head(read.next[:, size - 1 : -1]).argmax(-1)
    real = read.real[:, size:]
    wrong = ((tokens != asked) & real).sum(-1, keepdim=True)
    order = torch.rand(real.shape, device=real.device).masked_fill(~real, 2.0).argsort(-1)
    is_true = (order.argsort(-1) < (glance * wrong).round())[..., None]
    start = prompt.embeds.shape[1] - length + size
    embeds, states = prompt.embeds[:, start:], prompt.states[:, start:]
    embeds = torch.where(is_true, embeds, reader.embed(tokens).to(embeds))
    states = torch.where(is_true, states, own.to(states))
    return replace(
        prompt,
        embeds=torch.cat((prompt.embeds[:, :start], embeds), 1),
        states=torch.cat((prompt.states[:, :start], states), 1),
    )


def _loss(
    reader: Reader, head: FalconHead, read: TargetOutputs, states: Tensor, weight: float
) -> Tensor:  # ()
    late, length = head.config.block - 1, read.next.shape[1]
    own = states[:, -length:][:, : max(length - late, 0)]
    real = read.real[:, late:]
    if not bool(real.any()):
        return 0.0 * states.sum()
    own, labels = own[real], read.next[:, late:][real]
    loss = soft_cross_entropy(reader.head(own), reader.head(labels))
    return functional.smooth_l1_loss(own, labels) + weight * loss


def new_falcon(target: Reader, counts: Tensor, **changes: Any) -> FalconHead:
    """Make an untrained head for a target."""
    return FalconHead(FalconHeadConfig.of(target.config, target.vocabulary, **changes))


FALCON = HeadTraining(new_falcon, falcon_loss, check_continues, rate=3e-4)
