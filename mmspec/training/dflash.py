"""Train a DFlash head: blocks of masked tokens at random places of the answers.

Chen et al. 2026, section 4. A block starts with a token of the answer, its anchor, and masks the
ones after it. All blocks of an example are read in one pass, each over the context before its
anchor:

    keys        context a b c d e    block c ? ?    block d ? ?
    block c             x x .  . .         x x x          . . .
    block d             x x x  . .         . . .          x x x
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from mmspec.drafters.neural.dflash import ContextSlots, context_slots
from mmspec.drafters.neural.feature_head import check_head, tap_of
from mmspec.models.heads.dflash import DFlashHead, DFlashHeadConfig, uniform_layers
from mmspec.models.heads.p_eagle import unused_token
from mmspec.targets.readers.reader import Reader
from mmspec.training.heads import TrainingExample, read_example
from mmspec.training.self_fed import limit_vocabulary
from mmspec.training.trainable import HeadTraining


def dflash_loss(
    reader: Reader, head: DFlashHead, example: TrainingExample, blocks: int = 64
) -> Tensor:  # ()
    """Cross entropy of the masked tokens of random blocks, in weighted mean.

    Masked token j of a block has weight exp(-(j - 1) / gamma), see `block_gamma`. Tokens outside of
    the draft vocabulary are ignored.
    """
    read = read_example(reader, example, tap_of(head, reader))
    context = context_slots(head, reader, read.prompt)
    length = read.next.shape[1]
    tokens = example.tokens.repeat(len(read.next) // len(example.tokens), 1)
    anchors = sample_anchors(read.real, blocks)
    if not anchors.shape[1]:
        return 0.0 * context.states.sum()
    states = run_blocks(reader, head, context, tokens, anchors)[:, :, 1:]  # (R, A, K, D)
    steps = torch.arange(1, head.config.block_size, device=tokens.device)
    places = anchors[..., None] + steps
    is_label = places < length
    places = places.clamp_max(length - 1).flatten(1)
    labels = tokens.gather(1, places).view_as(is_label)
    is_label &= read.real.gather(1, places).view_as(is_label)
    if head.has_draft_vocabulary:
        is_label &= head.t2d[labels.clamp_min(0)]
    if not bool(is_label.any()):
        return 0.0 * states.sum()
    logits = head.logits(states[is_label], reader.head).float()
    labels = labels[is_label]
    if head.has_draft_vocabulary:
        labels = torch.searchsorted(head.token_ids, labels)
    gamma = block_gamma(head.config.block_size)
    weights = torch.exp((1 - steps) / gamma).expand_as(is_label)[is_label]
    losses = functional.cross_entropy(logits, labels, reduction="none")
    loss: Tensor = (weights * losses).sum() / weights.sum()
    return loss


def run_blocks(
    reader: Reader, head: DFlashHead, context: ContextSlots, tokens: Tensor, anchors: Tensor
) -> Tensor:  # (R, A, block_size, D)
    """States of blocks at `anchors` (R, A), indices of the response `tokens` (R, T).

    The response takes the last T slots of the context.
    """
    rows, count = anchors.shape
    slots, size = context.states.shape[1], head.config.block_size
    at = slots - tokens.shape[1] + anchors  # (R, A) slots of the anchors
    block = tokens.new_full((rows, count, size), head.config.mask_token_id)
    block[..., 0] = tokens.gather(1, anchors).clamp_min(0)
    steps = torch.arange(size, device=tokens.device)
    axes = context.positions.expand(*context.positions.shape[:-2], rows, -1)
    firsts = axes.gather(-1, at.expand(*axes.shape[:-1], -1))
    positions = (firsts[..., None] + steps).flatten(-2)
    cache = DynamicCache()
    head.cache_context(context.states, context.positions, cache)
    mask = _block_mask(context, at, size)
    states: Tensor = head(reader.embed(block.flatten(1)), mask, positions, cache)
    return states.view(rows, count, size, -1)


def _block_mask(context: ContextSlots, at: Tensor, size: int) -> Tensor:  # (R, 1, A * S, L)
    """The additive mask: a block attends to the context before its anchor, and to itself."""
    like, count = context.states, at.shape[1]
    slots = torch.arange(like.shape[1], device=at.device)
    pads = torch.tensor(context.pads, device=at.device)[:, None, None]
    is_before = (slots < at[..., None]) & (slots >= pads)  # (R, A, n)
    own = torch.arange(count * size, device=at.device) // size
    is_own = own[:, None] == own
    both = torch.cat((is_before.repeat_interleave(size, 1), is_own.expand(len(at), -1, -1)), -1)
    zero = torch.zeros((), dtype=like.dtype, device=at.device)
    return torch.where(both, zero, torch.finfo(like.dtype).min)[:, None]


def sample_anchors(is_real: Tensor, count: int) -> Tensor:  # (R, T) bool -> (R, A)
    """Different random indices of tokens with a successor, at most `count` a row, ascending.

    A row with fewer of them is filled with others, whose successors are not real.
    """
    scores = torch.rand(is_real[:, 1:].shape, device=is_real.device)
    scores = scores.masked_fill(~is_real[:, 1:], -1.0)
    return scores.topk(min(count, scores.shape[1]), -1).indices.sort(-1).values


def block_gamma(size: int) -> float:
    """The decay of weights: 7, 5 and 4 for blocks of 16, 10 and 8; linear between (rebuilt)."""
    return max(round(3 * size / 8 + 1), 1)


def new_dflash(target: Reader, counts: Tensor, **changes: Any) -> DFlashHead:
    """Make an untrained head; its mask token is the least frequent one of the training data.

    Without `draft_vocab_size` its output head is the target's. Raises ValueError for sizes that are
    not of the vocabulary.
    """
    layers = len(target.layers)
    own: dict[str, Any] = {
        "mask_token_id": unused_token(counts),
        "num_target_layers": layers,
        "draft_vocab_size": None,
    }
    if changes.get("tapped_layers") is None:
        taps = changes.get("num_taps", DFlashHeadConfig.num_taps)
        own["tapped_layers"] = list(uniform_layers(layers, taps))
    changes = limit_vocabulary(target, {**own, **changes})
    config = DFlashHeadConfig.of(target.config, target.vocabulary, **changes)
    head = DFlashHead(config)
    head.choose_vocabulary(counts)
    return head


DFLASH = HeadTraining(new_dflash, dflash_loss, check_head, rate=6e-4, warm=0.04, clip=1.0)
