"""Train an adapter after the first layers of a target on the target's distributions (Kangaroo)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.drafters.neural.kangaroo import check_adapter
from mmspec.models.heads.kangaroo import KangarooAdapter, KangarooAdapterConfig
from mmspec.targets.readers.hooks import layer_states
from mmspec.targets.readers.reader import Reader
from mmspec.training.heads import TargetOutputs, TrainingExample, read_example
from mmspec.training.losses import soft_cross_entropy
from mmspec.training.trainable import HeadTraining


def kangaroo_loss(
    reader: Reader, adapter: KangarooAdapter, example: TrainingExample
) -> Tensor:  # ()
    """Cross entropy of the adapter's distribution of each token against the target's."""
    states, outputs = _adapter_states(reader, adapter, example)
    return soft_cross_entropy(
        reader.head(states[outputs.real]), reader.head(outputs.next[outputs.real])
    )


def imitation_loss(
    reader: Reader, adapter: KangarooAdapter, example: TrainingExample
) -> Tensor:  # ()
    """`kangaroo_loss`, cross entropy against the tokens, and 1 - cosine to the target's states.

    With equal weights (FastVLM; reconstructed).
    """
    states, outputs = _adapter_states(reader, adapter, example)
    own, target = states[outputs.real], outputs.next[outputs.real]
    distance = 1 - functional.cosine_similarity(own.float(), target.float(), -1).mean()
    tokens = example.tokens.repeat(len(states) // len(example.tokens), 1)[:, 1:]
    known = tokens >= 0
    hard = functional.cross_entropy(reader.head(states[:, :-1][known]).float(), tokens[known])
    return soft_cross_entropy(reader.head(own), reader.head(target)) + hard + distance


def _adapter_states(
    reader: Reader, adapter: KangarooAdapter, example: TrainingExample
) -> tuple[Tensor, TargetOutputs]:  # (R, T, D)
    """Return the adapter's inputs of the output head for each token, and the target's outputs."""
    outputs = read_example(reader, example, layer_states([adapter.config.exit_layer]))
    early = outputs.prompt.features
    slots = torch.arange(early.shape[1], device=early.device)
    start = torch.tensor(list(outputs.prompt.padding), device=early.device)[:, None]
    mask = slots >= start if any(outputs.prompt.padding) else None
    states = adapter(early, mask, (slots - start).clamp_min(0))
    return states[:, -outputs.next.shape[1] :], outputs


def new_adapter(target: Reader, counts: Tensor, **changes: Any) -> KangarooAdapter:
    """Make an untrained adapter for a target."""
    config = KangarooAdapterConfig.of(target.config, target.vocabulary, **changes)
    return KangarooAdapter(config)


def new_imitation(target: Reader, counts: Tensor, **changes: Any) -> KangarooAdapter:
    """Make an untrained adapter with an MLP after the first quarter of a target's layers."""
    quarter = max(len(target.layers) // 4, 1)
    return new_adapter(target, counts, **{"exit_layer": quarter, "has_mlp": True, **changes})


KANGAROO = HeadTraining(new_adapter, kangaroo_loss, check_adapter, rate=1e-4)
FASTVLM = HeadTraining(new_imitation, imitation_loss, check_adapter, rate=1e-4)
