"""What is read beside a target's prefill: one layer's attention, and the hidden states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from mmspec.targets.backbone import FULL
from mmspec.targets.encoder_decoder import EncoderDecoder
from mmspec.targets.reader import Reader


class AttentionHook(TorchFunctionMode):
    """While entered, notes how much the last prompt token attends to each slot, in one layer.

    The layer's own call of `scaled_dot_product_attention` is watched and left as it is; only the
    softmax of the last query is computed beside it. FastV (Chen et al. 2024) ranks image tokens by
    the second layer. Nothing stays on the model. Raises ValueError at construction for a model
    whose attention is not sdpa.
    """

    def __init__(self, backbone: Reader, layer: int | None = None) -> None:
        super().__init__()
        if backbone.config._attn_implementation != "sdpa":
            raise ValueError(
                "attention can only be tapped from sdpa, not "
                f"{backbone.config._attn_implementation!r}; load the model with "
                "attn_implementation='sdpa' or choose a compressor that needs no attention"
            )
        self.layer = backbone.decoder.layers[
            second_full(backbone.config) if layer is None else layer
        ]
        self.attention: Tensor | None = None  # (B, L) mean over heads, padding included
        self._listening = False
        self._hooks: list[Any] = []

    def __enter__(self) -> AttentionHook:
        self._hooks = [
            self.layer.register_forward_pre_hook(lambda *_: self._listen(True)),
            self.layer.register_forward_hook(lambda *_: self._listen(False)),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._listening and func is functional.scaled_dot_product_attention:
            self._listening = False
            self.attention = last_attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _listen(self, listening: bool) -> None:
        self._listening = listening


def last_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # (B, S)
    """Attention of the last query, mean over heads; the arguments are those of torch's sdpa."""
    last = query[:, :, -1:].float()  # the last query may see every key that is not masked
    groups = query.shape[1] // key.shape[1]
    keys = key.repeat_interleave(groups, 1).float()
    scores = last @ keys.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        mask = attn_mask[..., -1:, :]
        hidden = ~mask if mask.dtype == torch.bool else mask < torch.finfo(mask.dtype).min / 2
        scores = scores.masked_fill(hidden, -torch.inf)
        if mask.dtype != torch.bool:
            scores = scores + mask.masked_fill(hidden, 0)
    return scores.softmax(-1).mean(1)[:, 0]


def second_full(config: Any) -> int:
    """The second decoder layer with full attention, or the only one. Raises ValueError."""
    types = config.layer_types if getattr(config, "layer_types", None) else None
    count = int(config.num_hidden_layers)
    full = [at for at in range(count) if types is None or types[at] == FULL]
    if not full:
        raise ValueError(
            f"{type(config).__name__} has no full-attention layer to tap; choose a compressor that "
            "needs none"
        )
    return full[min(1, len(full) - 1)]


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
