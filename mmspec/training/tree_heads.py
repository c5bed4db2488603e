"""Train a tree head: run a recipe with dynamic trees, and note which nodes are accepted.

bind = lambda shape: mmspec.accelerate(model, "coupled", drafter=drafter, tree=shape)
train_tree(bind, requests).head.save("tree.safetensors")
mmspec.accelerate(model, "coupled", drafter=drafter, tree=C2T("tree.safetensors"))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Kind
from mmspec.drafters.draft_model import DraftModel, DraftUpdate, GrownDraft
from mmspec.drafters.shapes import Shape
from mmspec.drafters.trees.c2t import TreeHead, entropy_of, tree_features
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.errors import check_number
from mmspec.recipe import TREE
from mmspec.targets.tokens.context import Context
from mmspec.training.acceptance_heads import fit_head, record_drafts


@dataclass(frozen=True)
class RecordedTree(Shape):
    """A dynamic tree that notes the features of its nodes, and which of them are accepted."""

    tree: DynamicTree
    features: list[Tensor] = field(default_factory=list, compare=False)  # (n, 3) each
    labels: list[Tensor] = field(default_factory=list, compare=False)  # (n,) each

    kinds = (Kind.RACE, Kind.DET)
    walk = TREE

    @property
    def description(self) -> str:
        return self.tree.description

    @property
    def max_depth(self) -> int:
        return self.tree.depth

    def begin(self) -> list[Tensor]:
        return []

    def grow(
        self, model: DraftModel, context: Context, state: Any, shape_state: Any, kind: Kind
    ) -> GrownDraft:
        grown = self.tree.grow(model, context, state, None, kind)
        shape_state[:] = [node_features(grown)] if grown.draft.nodes else []
        return grown

    def observe(self, shape_state: Any, update: DraftUpdate) -> Any:
        for features in shape_state:
            label = torch.zeros(features.shape[:2])
            for row, path in enumerate(update.round.path):
                label[row, list(path)] = 1
            live = ~torch.tensor(update.round.finished)
            self.features.append(features[live].flatten(0, 1).cpu())
            self.labels.append(label[live].flatten())
        return shape_state


def node_features(grown: GrownDraft) -> Tensor:  # (B, N, 3)
    """`tree_features` of all nodes of a draft."""
    draft, own = grown.draft, grown.token_probs()
    assert own is not None
    assert draft.read_order is not None
    log_q = own.float().clamp_min(1e-30).log()
    path = (draft.reach[:, 1:] * log_q[:, None]).sum(-1)
    after = draft.read_order.gather(1, draft.parents.clamp_min(0)) + 1
    places = torch.where(draft.parents < 0, 0, after)
    entropy = entropy_of(Categorical.cat(grown.distributions)).gather(1, places)
    return tree_features(path, entropy, draft.depths())


@dataclass(frozen=True)
class TrainedTree:
    """A tree head, and what it was trained on."""

    head: TreeHead
    num_nodes: int
    accepted: float  # share of them
    loss: float  # at the end, per node, in nats


def train_tree(
    bind: Callable[[Shape], Any],
    requests: Sequence[Mapping[str, Any]],
    depth: int = 6,
    nodes: int = 48,
    steps: int = 500,
    rate: float = 1e-2,
    seed: int = 0,
) -> TrainedTree:
    """Train a head on dynamic trees of `depth` levels and `nodes` nodes.

    `bind` accelerates a model with a draft model and a shape, `requests` are arguments of its
    `generate`. Raises ValueError where nothing was drafted.
    """
    check_number("steps", steps, 1, whole=True, example=500)
    shape = RecordedTree(DynamicTree(depth=depth, beam=8, nodes=nodes))
    return fit_tree(*record_drafts(bind, shape, requests), steps, rate, seed)


def fit_tree(
    features: Tensor, labels: Tensor, steps: int, rate: float = 1e-2, seed: int = 0
) -> TrainedTree:  # (n, 3), (n,)
    """Fit a head by binary cross entropy, so that it predicts the chance of acceptance."""
    head, loss = fit_head(TreeHead, features, labels, steps, rate, seed)
    return TrainedTree(head, len(labels), float(labels.mean()), loss)
