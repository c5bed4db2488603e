"""Teach action slots what their target says behind a prompt.

reader = accelerate(model, "plain").backbone           # the target, frozen
head = new_slots(reader, torch.zeros(reader.vocabulary))
learn(ACTION_SLOTS_TRAINING, reader, head, lessons, steps=2000)
head.save_pretrained(folder)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.drafters.neural.target_states import check_heads
from mmspec.models.heads.action_slots import ActionSlots, ActionSlotsConfig, slots_of
from mmspec.targets.readers.reader import Reader
from mmspec.training.heads import Lesson, read
from mmspec.training.trainable import HeadTraining


def slots_loss(
    reader: Reader, head: ActionSlots, lesson: Lesson, corrects: bool = False
) -> Tensor:  # ()
    """Cross entropy of the open slots.

    Of every other answer the first token is known, as when a draft begins, of the rest any 1 .. S -
    1, as behind a rejection (reconstructed). Where it `corrects` a lesson, the open slots learn
    what the target would say behind the tokens before, and not the tokens themselves: for answers
    that are not its own. That is of one branch, so not for a lesson with guidance.
    """
    pairs, size = read(reader, lesson), head.config.num_slots
    length = pairs.states.shape[1] - lesson.tokens.shape[1] + 1  # of the prompt
    states, seen = pairs.states[:, :length], pairs.seen[:, :length]
    tokens = functional.pad(lesson.tokens, (0, size), value=-1)[:, :size]
    tokens = tokens.repeat(len(states) // len(tokens), 1)
    count = torch.randint(1, max(size, 2), (len(tokens), 1))
    count = torch.where(torch.rand(len(tokens), 1) < 0.5, 1, count).to(tokens.device)
    known = torch.arange(size, device=tokens.device) < count
    out = head(states, reader.embed(tokens.clamp_min(0)), known, seen)
    asked = ~known & (tokens >= 0)
    if corrects:
        assert len(states) == len(lesson.tokens), "guidance has two branches"
        tokens = functional.pad(reader.head(pairs.next).argmax(-1), (1, size))[:, :size]
    if not bool(asked.any()):
        nothing: Tensor = out.sum() * 0.0
        return nothing
    return functional.cross_entropy(reader.head(out[asked]).float(), tokens[asked])


def new_slots(target: Reader, counts: Tensor, **changes: Any) -> ActionSlots:
    """Untrained slots for a target, as many as a policy's longest answer has tokens."""
    given = {"num_slots": slots_of(target.model.config), **changes}
    config: Any = ActionSlotsConfig.of(target.config, target.vocabulary, **given)
    return ActionSlots(config)


ACTION_SLOTS_TRAINING = HeadTraining(
    new_slots, slots_loss, check_heads, rate=1e-3, warm=None, floor=0.01
)
