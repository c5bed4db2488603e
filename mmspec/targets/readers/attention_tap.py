"""How much chosen prompt tokens attend to each slot, beside a prefill that is left as it is.

The model stays with its fused kernel: its own calls of `scaled_dot_product_attention` are watched,
and the softmax of the chosen queries alone is computed once more. Nothing stays on the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from mmspec.targets.cache import crossed_layers
from mmspec.targets.readers.backbone import FULL
from mmspec.targets.readers.encoder_decoder import EncoderDecoder
from mmspec.targets.readers.family import Family
from mmspec.targets.readers.reader import Reader

FIRST, LAST, MEAN, HEADS = (
    "attention",  # (B, L) of the last token, in the second layer with full attention (FastV)
    "last-layer-attention",  # (B, L) of the question, in the last such layer (DREAM)
    "question-attention",  # (B, L) of the question, mean over all such layers (SpecVLM, HIPPO)
    "head-attention",  # by layer (B, G, L) of the question; G heads of keys, or of queries (StD)
)
ROWS = 64  # queries at a time: their attention to all slots may be large
OFFERED = frozenset({FIRST, LAST, MEAN, HEADS})


class AttentionCall(NamedTuple):
    """The arguments of a call of torch's `scaled_dot_product_attention`, in its order."""

    query: Tensor  # (B, heads, q, d)
    key: Tensor  # (B, G, S, d)
    value: Tensor  # (B, G, S, d)
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def factor(self) -> float:
        """Of the products of queries and keys."""
        return float(self.query.shape[-1] ** -0.5) if self.scale is None else self.scale

    def asked(self, most: int) -> Tensor:  # (B, G, g, R, d)
        """The last `most` queries by the head of keys that they meet, and scaled."""
        queries = self.query[:, :, -most:].float().unflatten(1, (self.key.shape[1], -1))
        scaled: Tensor = queries * self.factor
        return scaled

    def bias(self, most: int) -> Tensor | None:  # (1 or B, 1 or heads, R, S)
        """What is added to the scores of the last `most` queries."""
        hide, mask = torch.finfo(torch.float32).min, self.attn_mask
        if mask is not None:
            mask = mask[..., -most:, :]
            if mask.dtype != torch.bool:
                hidden = mask < torch.finfo(mask.dtype).min / 2
                return mask.float().masked_fill(hidden, hide)
        elif self.is_causal:
            size = (self.query.shape[2], self.key.shape[2])
            ones = torch.ones(size, dtype=torch.bool, device=self.query.device)
            mask = ones.tril()[None, None, -most:]
        if mask is None:
            return None
        zeros = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
        return zeros.masked_fill(~mask, hide)


class KernelTap(TorchFunctionMode, ABC):
    """While entered, is told of every call of the fused kernel, which runs as it would."""

    @abstractmethod
    def note(self, call: AttentionCall) -> None:
        """Look at one call."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            self.note(AttentionCall(*args, **kwargs))
        return func(*args, **kwargs)


class LayerTap(KernelTap, ABC):
    """While entered, is told of the calls of some layers, each one's first."""

    def __init__(self, layers: Mapping[int, Any]) -> None:
        super().__init__()
        self.layers = dict(layers)
        self._listening: int | None = None
        self._hooks: list[Any] = []

    @abstractmethod
    def hear(self, layer: int, call: AttentionCall) -> None:
        """Look at a layer's call."""

    def __enter__(self) -> Self:
        for index, layer in self.layers.items():
            before, after = self._switch(index), self._switch(None)
            self._hooks.append(layer.register_forward_pre_hook(before))
            self._hooks.append(layer.register_forward_hook(after))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def note(self, call: AttentionCall) -> None:
        if self._listening is not None:
            layer, self._listening = self._listening, None
            self.hear(layer, call)

    def _switch(self, layer: int | None) -> Callable[..., None]:
        def listen(*_: Any) -> None:
            self._listening = layer

        return listen


class AttentionTap(LayerTap):
    """While entered, notes what the last prompt tokens of each row attend to.

    `wants` are names out of OFFERED, `rows` how many of the last tokens of each row are asked:
    the *question*, the same for all layers. Layers that slide are left out, but for
    "head-attention". Raises ValueError at construction for a model that cannot give it.
    """

    def __init__(self, backbone: Reader, wants: frozenset[str], rows: Sequence[int] = ()) -> None:
        check_tappable(backbone)
        wants = wants & OFFERED
        layers = tapped_layers(backbone.config, wants)
        super().__init__({layer: backbone.layers[layer] for layer in layers})
        self.wants, self.rows = wants, list(rows)
        self.full = full_layers(backbone.config) if self.wants - {HEADS} else []
        self.last: dict[int, Tensor] = {}  # layer -> (B, G, L) of the last token
        self.mean: dict[int, Tensor] = {}  # layer -> (B, G, L) of the question

    def hear(self, layer: int, call: AttentionCall) -> None:
        self.last[layer], self.mean[layer] = attention_of(self.rows, call)

    def offer(self) -> dict[str, Any]:
        """What was wanted, by name. Padding is included and 0."""
        made: dict[str, Any] = {}
        if FIRST in self.wants:
            made[FIRST] = self.last[self.full[min(1, len(self.full) - 1)]].mean(1)
        if LAST in self.wants:
            made[LAST] = self.mean[self.full[-1]].mean(1)
        if MEAN in self.wants:
            made[MEAN] = torch.stack([self.mean[at].mean(1) for at in self.full]).mean(0)
        if HEADS in self.wants:
            made[HEADS] = self.mean
        return made


def check_tappable(backbone: Reader) -> None:
    """Refuse a model whose attention cannot be watched. Raises ValueError."""
    name = type(backbone.model).__name__
    if isinstance(backbone, EncoderDecoder):
        raise ValueError(
            f"{name} reads its source in an encoder, so its decoder attends to no visual tokens; "
            "choose a compressor that needs no attention"
        )
    if backbone.config._attn_implementation != "sdpa":
        raise ValueError(
            "attention can only be tapped from sdpa, not "
            f"{backbone.config._attn_implementation!r}; load {name} with "
            "attn_implementation='sdpa' or choose a compressor that needs no attention"
        )


def tapped_layers(config: Any, wants: frozenset[str]) -> list[int]:
    """The layers to watch. Raises ValueError where a model has none that attends to all slots."""
    if HEADS in wants:
        crossed = crossed_layers(config)
        return [at for at in range(int(config.num_hidden_layers)) if at not in crossed]
    full = full_layers(config)
    if MEAN in wants:
        return full
    first = [full[min(1, len(full) - 1)]] if FIRST in wants else []
    return sorted({*first, *([full[-1]] if LAST in wants else [])})


def full_layers(config: Any) -> list[int]:
    """Decoder layers with full attention to the text. Raises ValueError where there is none."""
    types = config.layer_types if getattr(config, "layer_types", None) else None
    crossed, every = crossed_layers(config), range(int(config.num_hidden_layers))
    full = [at for at in every if at not in crossed and (types is None or types[at] == FULL)]
    if not full:
        raise ValueError(
            f"{type(config).__name__} has no full-attention layer to tap; choose a compressor that "
            "needs none"
        )
    return full


def attention_of(
    rows: Sequence[int], call: AttentionCall
) -> tuple[Tensor, Tensor]:  # (B, G, S) each
    """Attention of the last query, and its mean over the last `rows[b]` queries of row b.

    Mean over the query heads of each of the G heads of keys, which transformers repeats for some
    calls and not for others, so that G is the number of heads of either.
    """
    query, key, most = call.query, call.key, max(rows, default=1)
    bias = call.bias(most)
    asked = call.asked(most)
    counts = torch.tensor(list(rows) or [1] * len(query), device=query.device)[:, None]
    back = torch.arange(most, 0, -1, device=query.device)  # the last query is 1 back
    weights = (back <= counts) / counts  # (B, R)
    mean = query.new_zeros(len(query), key.shape[1], key.shape[2], dtype=torch.float32)
    last = torch.zeros_like(mean)
    for group in range(key.shape[1]):
        keys = key[:, group, None].float().mT
        own = bias
        if bias is not None and bias.shape[1] > 1:
            own = bias.unflatten(1, (key.shape[1], -1))[:, group]
        for first in range(0, most, ROWS):
            lines = slice(first, first + ROWS)
            scores = asked[:, group, :, lines] @ keys  # (B, g, r, S)
            if own is not None:
                scores = scores + own[:, :, lines]
            attention = scores.softmax(-1).mean(1)
            mean[:, group] += (attention * weights[:, lines, None]).sum(1)
            last[:, group] = attention[:, -1]
    return last, mean


class ClassTokenTap(KernelTap):
    """While the pictures are encoded, notes what the class token of the vision tower attends to.

    Taken in the layer whose output the model uses. Raises ValueError at construction for a tower
    that has no class token in front of one feature per placeholder.
    """

    def __init__(self, model: Any, family: Family) -> None:
        super().__init__()
        call = None if family.tower is None else family.tower.class_layer(model.config)
        if call is None:
            raise ValueError(
                f"the vision tower of {type(model).__name__} gives no class token beside one "
                "feature per image token; choose a compressor that needs none"
            )
        kernel = model.config.vision_config._attn_implementation
        if kernel != "sdpa":
            raise ValueError(
                f"the class token's attention can only be tapped from sdpa, not {kernel!r}; load "
                "the model with attn_implementation='sdpa'"
            )
        self.call = call
        self.attention: list[Tensor] = []  # per picture (n,)
        self._seen = 0

    def note(self, call: AttentionCall) -> None:
        if self._seen == self.call:
            self.attention = list(_class_attention(call))
        self._seen += 1


def _class_attention(call: AttentionCall) -> Tensor:  # (pictures, n)
    """Attention of the first query, mean over heads, without its own share."""
    scores = call.query[:, :, :1].float() @ call.key.float().mT * call.factor
    attention: Tensor = scores.softmax(-1).mean(1)
    return attention[:, 0, 1:]
