"""What is read beside a target's prefill: hidden states, of the last layer and of early ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspec.targets.encoder_decoder import EncoderDecoder
from mmspec.targets.reader import Reader


class HiddenStateHook:
    """While entered, notes what the decoder read last and its hidden states behind the final norm.

    Pictures are among what it read, as the embeddings that stand for them; a guided backbone reads
    both branches, so B is 2B there. Nothing stays on the model. Raises ValueError at construction
    for a model without a decoder of its own.
    """

    def __init__(self, backbone: Reader) -> None:
        if isinstance(backbone, EncoderDecoder):
            raise ValueError(
                f"{type(backbone.model).__name__} hides the states of its decoder behind an "
                "encoder, and a feature head needs them; use a draft model"
            )
        self.backbone = backbone
        self.embeds: Tensor  # (B, L, D) what was read
        self.hidden: Tensor  # (B, L, D) what came out
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
        layers = backbone.decoder.layers
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
