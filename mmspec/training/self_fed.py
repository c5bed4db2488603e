"""Train a head on its own states, as in drafting (EAGLE-3's training-time test, HASS, HiViS).

A draft's first state is the target's, the next ones are the head's. So an example is read in
several passes, and in every pass but the first each slot reads the head's output of the pass
before:

    pass 0   slot t   reads the target's states of slots 0..t
    pass i   slot t   represents slot t + i: it reads the target's states of slots 0..t, and the
                      head's own of slots t + 1 .. t + i, one from each pass

as in drafting. Tokens and positions are shifted by one slot per pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from mmspec.drafters.neural.feature_head import check_head
from mmspec.drafters.neural.head_prompt import HeadPrompt, head_prompt
from mmspec.errors import check_number
from mmspec.models.heads.eagle3 import Eagle3Head, Eagle3HeadConfig
from mmspec.models.heads.state_head import SlotMarks, StateHead, has_axis_per_frequency
from mmspec.models.llama_layers import mask_by_kind
from mmspec.targets.readers.reader import Reader
from mmspec.training.heads import (
    TrainingExample,
    additive_mask,
    check_continues,
    gather_slots,
    new_head,
    read_example,
    read_with_noise,
    required_inputs,
)
from mmspec.training.losses import soft_cross_entropy, top_cross_entropy
from mmspec.training.trainable import HeadTraining

DRAFT_VOCABULARY = 32_768  # tokens that a head drafts, of a larger vocabulary


def unroll_passes(head: StateHead, prompt: HeadPrompt, last: int, passes: int) -> Iterator[Tensor]:
    """Yield states (R, T, D) of the `last` T slots in each pass, as computed in drafting.

    Slot t of pass i represents slot t + i, and is invalid after the end of its row. In packed
    sequences they are the slots of all responses.
    """
    like, device = prompt.states, prompt.embeds.device
    where, mask = prompt.response_slots(last), additive_mask(prompt)
    cache, slots = DynamicCache(), torch.arange(prompt.embeds.shape[1], device=device)
    masks = mask_by_kind(head.config, mask, slots, slots)
    own = head(
        prompt.embeds, like, masks, prompt.positions, past_key_values=cache, marks=prompt.marks
    )
    own = gather_slots(own, where)
    yield own
    rows = torch.arange(len(where), device=device)[:, None]
    mask = mask.expand(len(where), -1, -1, -1)[rows, :, where].transpose(1, 2)
    hide = torch.finfo(like.dtype).min
    self_only = torch.full((last, last), hide, dtype=like.dtype, device=device).fill_diagonal_(0)
    self_only = self_only.expand(len(where), 1, -1, -1)
    inputs = gather_slots(prompt.embeds, where)
    positions = prompt.positions.gather(-1, where.expand_as(prompt.positions[..., :last]))
    keys = slots.expand(len(where), -1)
    for step in range(1, passes):
        embeds = functional.pad(inputs, (0, 0, 0, step))[:, step:]
        mask = torch.cat((mask, self_only), -1)
        steps = torch.full((1, last), step, device=device)
        marks = SlotMarks(steps, None, prompt.global_vector)
        keys = torch.cat((keys, where + step), -1)
        masks = mask_by_kind(head.config, mask, where + step, keys)
        own = head(embeds, own, masks, positions + step, past_key_values=cache, marks=marks)
        yield own


def eagle3_loss(
    reader: Reader,
    head: Eagle3Head,
    example: TrainingExample,
    passes: int = 7,
    discount: float = 0.8,
) -> Tensor:  # ()
    """Soft cross entropy of pass i, times `discount`^i, in sum over passes (Li et al. 2025).

    The target's distribution is restricted to the draft vocabulary; positions whose most likely
    token is outside it are ignored.
    """
    read = read_example(reader, example, *required_inputs(head, reader))
    prompt, length = head_prompt(head, reader, read.prompt), read.next.shape[1]
    distributions = reader.head(read.next)
    is_label = read.real
    if head.has_draft_vocabulary:
        is_label = is_label & head.t2d[distributions.argmax(-1)]
        distributions = distributions[..., head.token_ids]
    total = torch.zeros((), device=distributions.device)
    count = min(passes, read.longest_response)
    for late, own in enumerate(unroll_passes(head, prompt, length, count)):
        is_used = read.is_followed(is_label, late)
        if bool(is_used.any()):
            logits = head.logits(own[:, : length - late][is_used], reader.head)
            loss = soft_cross_entropy(logits, distributions[:, late:][is_used])
            total = total + discount**late * loss
        else:
            total = total + 0.0 * own.sum()
    return total


def aligned_loss(
    reader: Reader,
    head: StateHead,
    example: TrainingExample,
    passes: int = 3,
    noise: float = 0.1,
    weight: float = 0.1,
    top: int = 10,
    top_weight: float = 1.0,
) -> Tensor:  # ()
    """EAGLE's loss and that of the target's `top` most likely tokens, in mean over passes.

    HASS (Zhang et al. 2024): harmonised objective and context. top_weight=0 drops the second loss
    (HiViS).
    """
    read, prompt = read_with_noise(reader, head, example, noise)
    length = read.next.shape[1]
    distributions = reader.head(read.next)
    count = min(passes, read.longest_response)
    total = torch.zeros((), device=distributions.device)
    for late, own in enumerate(unroll_passes(head, prompt, length, count)):
        real = read.is_followed(read.real, late)
        if not bool(real.any()):
            continue
        states, labels = own[:, : length - late][real], distributions[:, late:][real]
        logits = head.logits(states, reader.head)
        loss = functional.smooth_l1_loss(states, read.next[:, late:][real])
        loss = loss + weight * soft_cross_entropy(logits, labels)
        total = total + loss + top_weight * top_cross_entropy(logits, labels, top)
    return total / count


def new_eagle3(target: Reader, counts: Tensor, **changes: Any) -> Eagle3Head:
    """Make an untrained head whose draft vocabulary is the `draft_vocab_size` most frequent tokens.

    Ties go to the smaller id. Default: `DRAFT_VOCABULARY` tokens of a larger vocabulary; None = all
    tokens. By default it reads as inference engines do: image slots as the embedding of the
    placeholder token, and the target's positions with M-RoPE. Raises ValueError for sizes that are
    not of the vocabulary.
    """
    rope = getattr(target.config, "rope_parameters", None) or {}
    width = vars(target.config).get("head_dim")
    width = width or target.config.hidden_size // target.config.num_attention_heads
    has_axes = bool(rope.get("mrope_section")) and has_axis_per_frequency(rope, width // 2)
    positions = "mrope" if has_axes and target.family.rope_axes == 3 else "keep"
    usual = {"visual_slots": "placeholder", "positions": positions}
    changes = {**usual, **limit_vocabulary(target, changes)}
    config = Eagle3HeadConfig.of(target.config, target.vocabulary, **changes)
    head = Eagle3Head(config)
    head.choose_vocabulary(counts)
    return head


def limit_vocabulary(target: Reader, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Add the default draft vocabulary of a larger one to the changes of a configuration.

    Raises ValueError for a size that is not of the vocabulary.
    """
    size = DRAFT_VOCABULARY if target.vocabulary > DRAFT_VOCABULARY else None
    found = {"draft_vocab_size": size, **changes}
    if found["draft_vocab_size"] is not None:
        limits = (1, target.vocabulary)
        check_number("draft_vocab_size", found["draft_vocab_size"], *limits, whole=True)
    return found


EAGLE3 = HeadTraining(new_eagle3, eagle3_loss, check_head, rate=5e-5, is_packable=True)
HASS = HeadTraining(new_head, aligned_loss, check_continues, rate=3e-5, is_packable=True)
HIVIS = replace(
    HASS,
    begin=partial(new_head, visual_slots="hidden", positions="compact", num_steps=7),
    loss=partial(aligned_loss, passes=8, top_weight=0.0),
)
