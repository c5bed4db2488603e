"""Train look-ahead tokens of a frozen target (PaSS).

The response is read once, with look-ahead tokens as branches after some of its tokens:

    a - b - c - d - e       v1 after b is trained on the target's distribution after c,
        |   |               v2 on that after d
        v1  v1
        |   |
        v2  v2
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.draft import Draft, Kind, NodeInputs
from mmspec.drafters.neural.lookahead_tokens import check_tokens, embedding_width
from mmspec.drafters.neural.shared import SharedBackbone
from mmspec.models.heads.lookahead_tokens import LookaheadTokens, LookaheadTokensConfig
from mmspec.models.heads.p_eagle import unused_token
from mmspec.targets.memory import build_block
from mmspec.targets.readers.reader import Reader
from mmspec.training.heads import TrainingExample
from mmspec.training.losses import soft_cross_entropy
from mmspec.training.trainable import HeadTraining
from mmspec.trees import Tree


def lookahead_loss(
    reader: Reader, head: LookaheadTokens, example: TrainingExample, anchors: int = 64
) -> Tensor:  # ()
    """Cross entropy against the target's own distributions, in mean over at most `anchors` tokens.

    Token i after response token t is trained on the distribution after token t + i, i from 1.
    """
    tokens, count = example.tokens, head.config.num_tokens
    length = tokens.shape[1]
    starts = torch.randperm(length - 1)[:anchors].sort().values
    logits = read_branches(reader, head, example, starts)  # (B, T + A * K, V)
    branches = logits[:, length:].unflatten(1, (len(starts), count))
    starts = starts.to(tokens.device)
    places = starts[:, None] + torch.arange(1, count + 1, device=tokens.device)  # (A, K)
    is_inside = places < length
    places = places.clamp_max(length - 1)
    is_label = (tokens[:, places] >= 0) & is_inside
    if not bool(is_label.any()):
        nothing: Tensor = 0.0 * branches.sum()
        return nothing
    labels = logits[:, :length].detach()[:, places]
    return soft_cross_entropy(branches[is_label], labels[is_label])


def read_branches(
    reader: Reader, head: LookaheadTokens, example: TrainingExample, starts: Tensor
) -> Tensor:  # (B, T + A * K, V)
    """The target's logits after T response tokens, then after K look-ahead tokens of A `starts`."""
    tokens, count = example.tokens.clamp_min(0), head.config.num_tokens
    length = tokens.shape[1]
    parents = [*range(-1, length - 2)]
    for start in starts.tolist():
        first = len(parents)
        parents += [start - 1, *range(first, first + count - 1)]
    embeds = torch.cat(
        (reader.embed(tokens[:, 1:]), head(len(tokens)).repeat(1, len(starts), 1)), 1
    )
    ids = torch.nn.functional.pad(tokens[:, 1:], (0, len(starts) * count))
    draft = Draft.from_tree(Tree(tuple(parents)), ids, Kind.DET)
    draft = replace(draft, node_inputs=NodeInputs(embeds=embeds))
    with _frozen(reader.model):
        memory, _, _ = reader.prefill(example.inputs, extra_slots=len(parents) + 1)
        block = build_block(tokens[:, :1].tolist(), draft, memory.like)
        logits, _ = reader.read(memory, block)
    return logits


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Record no gradients of a model's weights, only those through its inputs."""
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    try:
        for weight in trainable:
            weight.requires_grad_(False)
        yield
    finally:
        for weight in trainable:
            weight.requires_grad_(True)


def new_lookahead(target: Reader, counts: Tensor, **changes: Any) -> LookaheadTokens:
    """Make untrained look-ahead tokens, all with the embedding of the least frequent token."""
    width = {"hidden_size": embedding_width(target)}
    config = LookaheadTokensConfig.of(target.config, target.vocabulary, **{**width, **changes})
    head = LookaheadTokens(config)
    token = torch.tensor([[unused_token(counts)]], device=target.device)
    head.copy_embedding(target.embed(token)[0, 0].detach())
    return head


def check_trainable(head: LookaheadTokens, reader: Reader) -> None:
    """Refuse tokens of another target, and a target that cannot read branches. ValueError."""
    check_tokens(head, reader)
    SharedBackbone(reader)


PASS = HeadTraining(new_lookahead, lookahead_loss, check_trainable, rate=1e-2)
