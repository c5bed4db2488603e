"""Train a P-EAGLE head: all depths of a draft in one run.

Hui et al. 2026, section 3. Besides the true slots of an example, a run reads unknown slots (t, d):
the d-th one of a draft that begins after true slot t. It attends to the true slots up to t and to
(t, 1) .. (t, d), stands at position t + d, and is trained on what true slot t + d predicts. Deeper
slots are sampled for fewer t (conditional drop of tokens), and (t, d) only where (t, d - 1) is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspec.drafters.neural.feature_head import check_head
from mmspec.drafters.neural.head_prompt import HeadPrompt, head_prompt
from mmspec.models.heads.p_eagle import PEagleHead, PEagleHeadConfig, unused_token
from mmspec.models.heads.state_head import SlotMarks
from mmspec.models.llama_layers import mask_by_kind
from mmspec.targets.readers.reader import Reader
from mmspec.training.heads import TrainingExample, read_example, required_inputs
from mmspec.training.losses import soft_cross_entropy
from mmspec.training.self_fed import limit_vocabulary
from mmspec.training.trainable import HeadTraining


def p_eagle_loss(
    reader: Reader,
    head: PEagleHead,
    example: TrainingExample,
    keep: float = 0.7,
    least: float = 0.2,
) -> Tensor:  # ()
    """Soft cross entropy of true and unknown slots, in mean over all of them.

    Depth d is sampled for a share max(`keep`^d, `least`) of the slots. The target's distribution is
    restricted to the draft vocabulary; tokens whose most likely one is outside of it are ignored.
    """
    read = read_example(reader, example, *required_inputs(head, reader))
    prompt, length = head_prompt(head, reader, read.prompt), read.next.shape[1]
    starts, depths = sample_depths(length, head.config.num_depths, keep, least)
    starts, depths = starts.to(reader.device), depths.to(reader.device)
    states = run_depths(reader, head, prompt, length, starts, depths)
    places = starts + depths
    distributions, is_label = reader.head(read.next), read.real
    if head.has_draft_vocabulary:
        is_label = is_label & head.t2d[distributions.argmax(-1)]
        distributions = distributions[..., head.token_ids]
    is_used = is_label[:, places]
    if not bool(is_used.any()):
        return 0.0 * states.sum()
    logits = head.logits(states[is_used], reader.head)
    return soft_cross_entropy(logits, distributions[:, places][is_used])


def run_depths(
    reader: Reader,
    head: PEagleHead,
    prompt: HeadPrompt,
    length: int,
    starts: Tensor,
    depths: Tensor,
) -> Tensor:  # (R, E, D)
    """States of slots (`starts`, `depths`) (E,), of the last `length` slots of a prompt.

    The first `length` are true slots, in order, of depth 0.
    """
    count, device = prompt.embeds.shape[1], prompt.embeds.device
    place = torch.arange(count - length, device=device)
    anchors = torch.cat((place, count - length + starts))  # of all slots of the run
    depths = torch.cat((torch.zeros_like(place), depths))
    num_unknown = len(anchors) - count
    mask_id = torch.full((1, num_unknown), head.config.mask_token_id, device=device)
    unknown = (head.embeddings or reader.embed)(mask_id).expand(len(prompt.embeds), -1, -1)
    masked = head.mask_states(num_unknown).expand(len(prompt.embeds), -1, -1)
    embeds = torch.cat((prompt.embeds, unknown.to(prompt.embeds)), 1)
    states = torch.cat((prompt.states, masked.to(prompt.states)), 1)
    positions = prompt.positions[..., anchors] + depths
    is_same = (anchors[:, None] == anchors) & (depths[:, None] >= depths)
    is_seen = is_same | ((depths == 0) & (anchors[:, None] >= anchors))
    is_real = prompt.attention_mask[:, anchors]
    seen = (is_seen & is_real[:, None])[:, None]
    zero = torch.zeros((), dtype=states.dtype, device=device)
    mask = torch.where(seen, zero, torch.finfo(states.dtype).min)
    masks = mask_by_kind(head.config, mask, anchors + depths, anchors + depths)
    out: Tensor = head(embeds, states, masks, positions, marks=SlotMarks())
    return out[:, count - length :]


def sample_depths(
    length: int, depths: int, keep: float, least: float
) -> tuple[Tensor, Tensor]:  # (E,) each
    """Slots (t, d) by depth, with t + d < `length`; those of depth 0 are all of them, in order."""
    order = torch.randperm(length)
    starts, levels = [torch.arange(length)], [torch.zeros(length, dtype=torch.int64)]
    for depth in range(1, depths):
        share = max(keep**depth, least)
        own = order[: round(share * length)]
        own = own[own + depth < length].sort().values
        starts.append(own)
        levels.append(torch.full_like(own, depth))
    return torch.cat(starts), torch.cat(levels)


def new_p_eagle(target: Reader, counts: Tensor, **changes: Any) -> PEagleHead:
    """Make an untrained head for the most frequent tokens, as many as of `new_eagle3`.

    Its mask token is the least frequent one of the training data, and it reads image slots as
    inference engines do, with the embedding of the placeholder token. An embedding table of its own
    starts as the target's.
    """
    own = {"visual_slots": "placeholder", "mask_token_id": unused_token(counts)}
    changes = {**own, **limit_vocabulary(target, changes)}
    config = PEagleHeadConfig.of(target.config, target.vocabulary, **changes)
    head = PEagleHead(config)
    head.choose_vocabulary(counts)
    if head.embed_tokens is not None:
        ids = torch.arange(target.vocabulary, device=target.device)
        head.copy_embeddings(target.embed(ids[None])[0].detach())
    return head


P_EAGLE = HeadTraining(new_p_eagle, p_eagle_loss, check_head, rate=5e-5)
