"""Shared by tests of heads on a target's states: heads of any parts, and a slow reference."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mmspec.drafters.neural.feature_head import tap_of
from mmspec.models.heads.dream import DreamHead
from mmspec.models.heads.eagle3 import Eagle3Head
from mmspec.models.heads.feature_head import FeatureHead
from mmspec.models.heads.state_head import ImageSlots, SlotMarks, StateHead
from mmspec.models.loading import random_model
from mmspec.targets.readers.reader import Reader
from mmspec.training.heads import TargetOutputs, TrainingExample, read_example
from tests import toys
from tests.drafters.heads import RecordedDistribution, greedy_example, paths
from tests.toys.readers import backbone

LAYERS, ROOM = 7, 10
MAKERS: dict[str, Any] = {"feature": FeatureHead, "eagle3": Eagle3Head, "dream": DreamHead}
Slot = tuple[Tensor, Tensor, bool, Tensor, Any]  # embedding, state, raw, global vector, position


@lru_cache(maxsize=8)
def target(family: str) -> Any:
    return toys.model(family, layers=LAYERS)


@lru_cache(maxsize=8)
def lesson(family: str, batch: int) -> TrainingExample:
    given = toys.inputs(family, batch=batch, ragged=batch > 1)
    ids, own = given["input_ids"], target(family)
    if "pixel_values" not in given:
        return greedy_example(own, given, ROOM)[0]
    out = own.generate(**given, max_new_tokens=ROOM, do_sample=False)
    return TrainingExample(given, out[:, ids.shape[1] :])


def head_of(family: str, maker: str = "feature", seed: int = 0, **parts: Any) -> Any:
    """A head of random wide weights, with all of its parts."""
    reader, kind = backbone(target(family)), MAKERS[maker]
    config = kind.config_class.of(reader.config, reader.vocabulary, **parts)
    head = random_model(lambda: kind(config), seed)
    if isinstance(head, Eagle3Head):
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(toys.WORDS), generator=generator) + toys.WORDS.start
        if head.has_draft_vocabulary:
            head.set_draft_vocabulary(order[: len(head.d2t)])
    if isinstance(head, DreamHead):
        with torch.no_grad():
            for name, weight in head.named_parameters():
                if name.endswith("_gate"):
                    weight.fill_(0.7)
    return head


def picture_of(embeds: Tensor, features: Tensor) -> ImageSlots:
    """An image for heads that need nothing else."""
    return ImageSlots(embeds, features, features, {}, embeds[:0])


def zero_head(head: StateHead) -> StateHead:
    with torch.no_grad():
        for weight in head.parameters():
            weight.zero_()
    return head


@torch.no_grad()
def slow(
    family: str, head: StateHead, example: TrainingExample, recorded: list[RecordedDistribution]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Recorded logits, and the same from scratch: no cache, no tree, no batch."""
    reader = backbone(target(family))
    read = read_example(reader, example, tap_of(head, reader))
    prompts = example.inputs["attention_mask"].sum(-1).tolist()
    read_nodes: list[Any] = []
    for one in recorded:
        read_nodes = [] if one.nodes is None else [*read_nodes, one.nodes]
        for row, length in enumerate(one.lengths):
            if length - prompts[row] >= example.tokens.shape[1]:
                continue
            for place, path in paths(read_nodes, row):
                new = length - prompts[row]
                yield (
                    one.distribution.scores[row, place],
                    along(reader, head, read, row, new, path)[1],
                )


def along(
    reader: Reader, head: StateHead, read: TargetOutputs, row: int, new: int, path: list[int]
) -> tuple[Tensor, Tensor]:
    """State (D,) and logits (V,) after `new` tokens of a row and a path of the head's own."""
    slots, where = true_slots(reader, head, read, row, new)
    example = slots[-1][3] if slots else torch.zeros(head.config.hidden_size)
    for step in range(len(path) + 1):
        embeds = torch.stack([one[0] for one in slots])[None]
        states = torch.stack([one[1] for one in slots])[None]
        marks = SlotMarks(
            torch.tensor([[*[0] * (len(slots) - step), *range(1, step + 1)]]),
            torch.tensor([[one[2] for one in slots]]),
            torch.stack([one[3] for one in slots])[None],
            (torch.arange(len(slots)) == 0)[None] if head.has_first_slot else None,
        )
        places = torch.stack([torch.as_tensor(one[4]) for one in slots], -1)[..., None, :]
        last = head(embeds, states, None, places, marks=marks)[0, -1]
        if step < len(path):
            own = (head.embeddings or reader.embed)(torch.tensor([path[step]]))[0]
            slots.append((own, last, False, example, where + step))
    return last, head.expand_logits(head.logits(last, reader.head))


def true_slots(
    reader: Reader, head: StateHead, read: TargetOutputs, row: int, new: int
) -> tuple[list[Slot], Any]:
    """The slots of the target's tokens in order, and the position of the next one."""
    prompt, config = read.prompt, head.config
    assert prompt.tokens is not None
    pad = prompt.padding[row]
    end = prompt.tokens.shape[1] - read.next.shape[1] + new
    tokens = prompt.tokens[row, pad:end].tolist()
    embeds, features = prompt.embeds[row, pad:end], prompt.features[row, pad:end]
    if head.has_first_slot:  # behind a token that is none
        tokens, embeds = [tokens[0], *tokens], torch.cat((embeds[:1], embeds))
        features = torch.cat((torch.zeros_like(features[:1]), features))
    table = head.embeddings or reader.embed
    visual = [token in reader.placeholder_ids for token in tokens]
    slots: list[Slot] = []
    example = torch.zeros(config.hidden_size)
    for t in range(len(tokens) - 1):
        inputs, raw, is_kept = embeds[t + 1], False, True
        is_own = config.visual_slots == "placeholder" or head.embeddings is not None
        if is_own:
            inputs = table(torch.tensor([tokens[t + 1]]))[0]
        if visual[t + 1] and config.visual_slots in ("hidden", "compressed"):
            is_kept = False
        if visual[t + 1] and config.visual_slots == "raw":
            raw = True
        state = head.fuse(features[t])
        position = _position(config.positions, prompt.positions, row, pad, t, len(slots))
        if is_kept:
            slots.append((inputs, state, raw, example, position))
        ends = visual[t + 1] and (t + 2 == len(tokens) or not visual[t + 2])
        if ends and config.visual_slots == "compressed":
            first = t + 1
            while visual[first - 1]:
                first -= 1
            here = slice(first, t + 2)
            glance = head.compress_image(picture_of(embeds[here], features[here]))
            for at, own in zip(glance.at, glance.inputs, strict=True):
                place = first - 1 + at
                slots.append((own, head.fuse(features[place]), True, example, place))
            example = torch.zeros_like(example) if glance.vector is None else glance.vector
    next_at = _position(config.positions, prompt.positions, row, pad, len(tokens) - 1, len(slots))
    return slots, next_at


def _position(policy: str, positions: Tensor | None, row: int, pad: int, t: int, count: int) -> Any:
    if policy == "mrope":
        assert positions is not None
        return positions[-3:, min(row, positions.shape[1] - 1), pad + t]
    return count if policy == "compact" else t
