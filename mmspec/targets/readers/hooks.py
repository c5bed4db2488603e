"""What is noted beside a target's forward: hidden states, of the last layer and of others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmspec.targets.cache import crossed_layers
from mmspec.targets.readers.encoder_decoder import EncoderDecoder
from mmspec.targets.readers.reader import Reader


class HiddenStateHook:
    """While entered, notes what the decoder read last and its hidden states behind the final norm.

    Pictures are among what it read, as the embeddings that stand for them; a guided backbone reads
    both branches, so B is 2B there. Nothing stays on the model. Raises ValueError at construction
    for a model without a decoder of its own.
    """

    def __init__(self, backbone: Reader) -> None:
        check_states(backbone)
        self.backbone = backbone
        self.embeds: Tensor  # (B, L, D) what was read
        self.hidden: Tensor  # (B, L, D) what came out
        self.positions: Tensor | None  # (B, L), or (axes, B, L) with M-RoPE; None = not told
        self._hook: Any = None

    def __enter__(self) -> HiddenStateHook:
        self._hook = self.backbone.decoder.register_forward_hook(self._note, with_kwargs=True)
        return self

    def __exit__(self, *error: Any) -> None:
        self._hook.remove()

    def _note(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        embeds = kwargs.get("inputs_embeds")
        ids: Any = args[0] if args else kwargs.get("input_ids")
        self.embeds = self.backbone.embed(ids) if embeds is None else embeds
        self.hidden = out.last_hidden_state
        self.positions = kwargs.get("position_ids")


class LayerStatesHook:
    """While entered, notes the hidden states of some layers, by their Hugging Face index.

    0 is what the first layer reads, i what layer i - 1 gives; the last index stands behind the
    final norm, unless `normed` is False. Raises ValueError at construction for a model without a
    decoder of its own, and for an index that it has not.
    """

    def __init__(self, backbone: Reader, layers: Sequence[int], normed: bool = True) -> None:
        check_states(backbone)
        stack = list(backbone.layers)
        wrong = [layer for layer in layers if not 0 <= layer <= len(stack)]
        if wrong:
            raise ValueError(
                f"hidden states {wrong} are asked for, but {type(backbone.model).__name__} has "
                f"{len(stack)} layers, whose states are 0 to {len(stack)}; give others"
            )
        self.layers = tuple(layers)
        crossed = crossed_layers(backbone.config)
        before = [at for layer in layers for at in _read_before(layer, crossed)]
        self.noted: dict[int, list[Tensor]] = {layer: [] for layer in (*layers, *before)}
        self._places = {layer: stack[max(layer - 1, 0)] for layer in self.noted}
        if normed and len(stack) in self._places:
            self._places[len(stack)] = backbone.decoder
        self._hooks: list[Any] = []

    def __enter__(self) -> LayerStatesHook:
        for layer, module in self._places.items():
            self._hooks.append(
                module.register_forward_hook(partial(self._after, layer))
                if layer
                else module.register_forward_pre_hook(self._before, with_kwargs=True)
            )
        return self

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def offer(self, last: int = 0) -> Tensor:  # (B, L, k * D)
        """States of all layers side by side, of the last so many places; 0 = of all."""
        rows = [torch.cat([one[:, -last:] for one in self._states(at)]) for at in self.layers]
        return torch.cat(rows, -1)

    def _states(self, layer: int) -> list[Tensor]:
        """Of a layer that was left out, what it would have read."""
        return self.noted[layer] or self._states(layer - 1)

    def _before(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.noted[0].append(args[0] if args else kwargs["hidden_states"])

    def _after(self, layer: int, module: torch.nn.Module, args: Any, out: Any) -> None:
        if not isinstance(out, Tensor):
            out = out[0]  # a tuple, or the output of a whole decoder
        self.noted[layer].append(out)


def _read_before(layer: int, crossed: Sequence[int]) -> list[int]:
    """States that stand for those of a layer that may be left out, the nearest first."""
    found = []
    while layer and layer - 1 in crossed:
        layer -= 1
        found.append(layer)
    return found


_LAYERS = "layers:"  # what a drafter wants begins so: "layers:2,16,29"


def layer_states(layers: Sequence[int]) -> str:
    """What a drafter `wants` for the hidden states of these layers (Hugging Face indices)."""
    return _LAYERS + ",".join(map(str, layers))


def wanted_layers(wants: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Names among `wants` that stand for hidden states of layers, and these layers."""
    named = [name for name in sorted(wants) if name.startswith(_LAYERS)]
    return {name: tuple(map(int, name.removeprefix(_LAYERS).split(","))) for name in named}


def check_states(backbone: Reader) -> None:
    """Refuse a model without a decoder of its own. Raises ValueError."""
    if isinstance(backbone, EncoderDecoder):
        raise ValueError(
            f"{type(backbone.model).__name__} hides the states of its decoder behind an "
            "encoder, and a feature head needs them; use a draft model"
        )


class SnapshotHook:
    """While entered, notes what the first layer reads and what comes out of an early one.

    Early is a quarter of the layers, and at least the second (ParallelVLM; reconstructed). Raises
    ValueError at construction for a model without a decoder of its own.
    """

    def __init__(self, backbone: Reader) -> None:
        if isinstance(backbone, EncoderDecoder):
            raise ValueError(
                f"{type(backbone.model).__name__} hides the states of its decoder behind an "
                "encoder; choose a compressor that needs no hidden states"
            )
        layers = backbone.layers
        self.first, self.early = layers[0], layers[min(max(2, len(layers) // 4), len(layers)) - 1]
        self.states: list[Tensor] = []  # (B, L, D) each
        self._hooks: list[Any] = []

    def __enter__(self) -> SnapshotHook:
        self._hooks = [
            self.first.register_forward_pre_hook(self._before, with_kwargs=True),
            self.early.register_forward_hook(self._after),
        ]
        return self

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def offer(self) -> Tensor:  # (2, B, L, D)
        return torch.stack(self.states)

    def _before(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.states.append(args[0] if args else kwargs["hidden_states"])

    def _after(self, module: torch.nn.Module, args: Any, out: Any) -> None:
        self.states.append(out[0] if isinstance(out, tuple) else out)
