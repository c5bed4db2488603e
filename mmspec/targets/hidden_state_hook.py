"""What a target's decoder reads and what comes out of it: the food of feature heads."""

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
