"""Hidden states of the early layer with the lowest attention entropy at each token (DREAM).

Hu et al. 2025: the input states of a layer with narrow attention are used as training targets,
selected token by token. For training only.

    E_l(t) = mean over heads of -sum_j a_l[t, j] log(a_l[t, j] + 1e-8),   l*(t) = argmin_l E_l(t)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from mmspec.targets.readers.attention_tap import ROWS, AttentionCall, LayerTap, check_tappable
from mmspec.targets.readers.hooks import LayerStatesHook
from mmspec.targets.readers.reader import Reader

TINY = 1e-8


class NarrowStatesHook:
    """Context manager that records states and attention entropies of the candidate layers.

    Raises ValueError at construction for a model whose attention cannot be recorded.
    """

    def __init__(self, backbone: Reader) -> None:
        layers = candidate_layers(len(backbone.layers))
        self.states = LayerStatesHook(backbone, layers)
        self.entropies = EntropyTap(backbone, layers)
        self._stack = ExitStack()

    def __enter__(self) -> NarrowStatesHook:
        self._stack.enter_context(self.states)
        self._stack.enter_context(self.entropies)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def offer(self, last: int) -> Tensor:  # (R, last, D)
        """The input states of the layer of lowest entropy at each of the `last` positions."""
        entropies = self.entropies.offer(last)
        states = self.states.offer(last).unflatten(-1, (len(entropies), -1))
        return narrowest(states, entropies)


def narrowest(states: Tensor, entropies: Tensor) -> Tensor:
    """Select states (R, q, k, D) of lowest entropy (k, R, q); ties go to the earlier layer."""
    least = entropies.argmin(0)[..., None, None].expand(-1, -1, 1, states.shape[-1])
    return states.gather(2, least)[:, :, 0]


def candidate_layers(layers: int) -> list[int]:
    """Layers 1 to c - 2 of so many, c being 0.4 of them, rounded down.

    Reconstructed for fewer than 8 layers, of which these are none: layer 1, or the only one.
    """
    return [*range(1, 2 * layers // 5 - 1)] or [min(1, layers - 1)]


class EntropyTap(LayerTap):
    """Context manager that records the attention entropy of some layers.

    Raises ValueError at construction as `AttentionTap`.
    """

    def __init__(self, backbone: Reader, layers: Sequence[int]) -> None:
        check_tappable(backbone)
        super().__init__({layer: backbone.layers[layer] for layer in layers})
        self.noted: dict[int, list[Tensor]] = {layer: [] for layer in layers}  # (B, q) each

    def record(self, layer: int, call: AttentionCall) -> None:
        self.noted[layer].append(entropy_of(call))

    def offer(self, last: int) -> Tensor:  # (k, R, last)
        """Entropies of the `last` positions, in the order of the layers.

        Raises ValueError for a layer without attention.
        """
        silent = [layer for layer, noted in self.noted.items() if not noted]
        if silent:
            raise ValueError(
                f"layers {silent} of this model have no attention, so no entropy can select its "
                "states; train another recipe for it, such as eagle-2"
            )
        rows = self.noted.values()
        return torch.stack([torch.cat([one[:, -last:] for one in noted]) for noted in rows])


def entropy_of(call: AttentionCall) -> Tensor:  # (B, q)
    """Entropy of every query's attention in nats, mean over heads."""
    groups, count = call.key.shape[1], call.query.shape[2]
    queries, keys = call.scaled_queries(count), call.key[:, :, None].float().mT
    bias = call.bias(count)
    if bias is not None:
        shared = bias.shape[1] == 1
        bias = bias[:, :, None] if shared else bias.unflatten(1, (groups, -1))
    found = []
    for first in range(0, count, ROWS):
        lines = slice(first, first + ROWS)
        scores = queries[:, :, :, lines] @ keys  # (B, G, g, r, S)
        if bias is not None:
            scores = scores + bias[:, :, :, lines]
        attention = scores.softmax(-1)
        entropy = -(attention * (attention + TINY).log()).sum(-1)
        found.append(entropy.flatten(1, 2).mean(1))
    return torch.cat(found, -1)
