"""Train action slots to predict the target's tokens after a prompt.

reader = accelerate(model, "plain").backbone           # the target, frozen
head = new_slots(reader, torch.zeros(reader.vocabulary))
learn(ACTION_SLOTS_TRAINING, reader, head, examples, steps=2000)
head.save_pretrained(folder)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.drafters.neural.target_heads import check_heads
from mmspec.models.heads.action_slots import ActionSlots, ActionSlotsConfig, count_slots
from mmspec.targets.readers.reader import Reader
from mmspec.training.heads import TrainingExample, read_pairs
from mmspec.training.trainable import HeadTraining


def slots_loss(
    reader: Reader, head: ActionSlots, example: TrainingExample, corrects: bool = False
) -> Tensor:  # ()
    """Cross entropy of the open slots.

    With probability 1/2 one token is known, as for a first draft, else 1 .. S - 1 tokens, as after
    a rejection (reconstructed). With `corrects`, the labels are the target's predictions given the
    tokens before, not the tokens themselves: for responses that are not the target's own. Not for
    examples with guidance, which have two branches.
    """
    pairs, size = read_pairs(reader, example), head.config.num_slots
    length = pairs.states.shape[1] - example.tokens.shape[1] + 1  # of the prompt
    states, seen = pairs.states[:, :length], pairs.seen[:, :length]
    tokens = functional.pad(example.tokens, (0, size), value=-1)[:, :size]
    tokens = tokens.repeat(len(states) // len(tokens), 1)
    count = torch.randint(1, max(size, 2), (len(tokens), 1))
    count = torch.where(torch.rand(len(tokens), 1) < 0.5, 1, count).to(tokens.device)
    known = torch.arange(size, device=tokens.device) < count
    out = head(states, reader.embed(tokens.clamp_min(0)), known, seen)
    is_label = ~known & (tokens >= 0)
    if corrects:
        assert len(states) == len(example.tokens), "guidance has two branches"
        tokens = functional.pad(reader.head(pairs.next).argmax(-1), (1, size))[:, :size]
    if not bool(is_label.any()):
        nothing: Tensor = out.sum() * 0.0
        return nothing
    return functional.cross_entropy(reader.head(out[is_label]).float(), tokens[is_label])


def new_slots(target: Reader, counts: Tensor, **changes: Any) -> ActionSlots:
    """Make untrained slots for a target, as many as tokens of the policy's longest action."""
    settings = {"num_slots": count_slots(target.model.config), **changes}
    config: Any = ActionSlotsConfig.of(target.config, target.vocabulary, **settings)
    return ActionSlots(config)


ACTION_SLOTS_TRAINING = HeadTraining(
    new_slots, slots_loss, check_heads, rate=1e-3, warm=None, floor=0.01
)
