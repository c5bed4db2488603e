"""Attention of selected prompt tokens to each slot, recorded during an unchanged prefill.

The model keeps its fused kernel: its calls of `scaled_dot_product_attention` are intercepted, and
the softmax of the selected queries is computed once more. Hooks are removed at exit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from mmspec.targets.cache import cross_attention_layers
from mmspec.targets.readers.backbone import FULL
from mmspec.targets.readers.encoder_decoder import EncoderDecoder
from mmspec.targets.readers.reader import Family, Reader

FIRST, LAST, MEAN, HEADS = (
    "attention",  # (B, L) of the last token, in the second layer with full attention (FastV)
    "last-layer-attention",  # (B, L) of the question, in the last such layer (DREAM)
    "question-attention",  # (B, L) of the question, mean over all such layers (SpecVLM, HIPPO)
    "head-attention",  # by layer (B, G, L) of the question; G heads of keys, or of queries (StD)
)
ROWS = 64  # queries at a time: their attention to all slots may be large
ATTENTION_FEATURES = frozenset({FIRST, LAST, MEAN, HEADS})


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

    def scaled_queries(self, count: int) -> Tensor:  # (B, G, g, R, d)
        """The last `count` queries, scaled and grouped by key head."""
        queries = self.query[:, :, -count:].float().unflatten(1, (self.key.shape[1], -1))
        scaled: Tensor = queries * self.factor
        return scaled

    def bias(self, count: int) -> Tensor | None:  # (1 or B, 1 or heads, R, S)
        """The bias of the scores of the last `count` queries."""
        hide, mask = torch.finfo(torch.float32).min, self.attn_mask
        if mask is not None:
            mask = mask[..., -count:, :]
            if mask.dtype != torch.bool:
                hidden = mask < torch.finfo(mask.dtype).min / 2
                return mask.float().masked_fill(hidden, hide)
        elif self.is_causal:
            size = (self.query.shape[2], self.key.shape[2])
            ones = torch.ones(size, dtype=torch.bool, device=self.query.device)
            mask = ones.tril()[None, None, -count:]
        if mask is None:
            return None
        zeros = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
        return zeros.masked_fill(~mask, hide)


class KernelTap(TorchFunctionMode, ABC):
    """Context manager that observes every call of the fused attention kernel."""

    @abstractmethod
    def record_call(self, call: AttentionCall) -> None:
        """Record one call."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            self.record_call(AttentionCall(*args, **kwargs))
        return func(*args, **kwargs)


class LayerTap(KernelTap, ABC):
    """Context manager that observes the first attention call of each of some layers."""

    def __init__(self, layers: Mapping[int, Any]) -> None:
        super().__init__()
        self.layers = dict(layers)
        self._active_layer: int | None = None
        self._hooks: list[Any] = []

    @abstractmethod
    def record(self, layer: int, call: AttentionCall) -> None:
        """Record a layer's call."""

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

    def record_call(self, call: AttentionCall) -> None:
        if self._active_layer is not None:
            layer, self._active_layer = self._active_layer, None
            self.record(layer, call)

    def _switch(self, layer: int | None) -> Callable[..., None]:
        def activate(*_: Any) -> None:
            self._active_layer = layer

        return activate


class AttentionTap(LayerTap):
    """Context manager that records the attention of the last prompt tokens of each row.

    `required_features` are names in ATTENTION_FEATURES, `rows` the number of last tokens per row:
    the *question*, the same for all layers. Sliding-window layers are excluded, except for
    "head-attention". Raises ValueError at construction for an unsupported model.
    """

    def __init__(
        self, backbone: Reader, required_features: frozenset[str], rows: Sequence[int] = ()
    ) -> None:
        check_tappable(backbone)
        check_whole(backbone.model, "attention")
        required_features = required_features & ATTENTION_FEATURES
        layers = tapped_layers(backbone.config, required_features)
        super().__init__({layer: backbone.layers[layer] for layer in layers})
        self.required_features, self.rows = required_features, list(rows)
        self.full = full_layers(backbone.config) if self.required_features - {HEADS} else []
        self.last: dict[int, Tensor] = {}  # layer -> (B, G, L) of the last token
        self.mean: dict[int, Tensor] = {}  # layer -> (B, G, L) of the question

    def record(self, layer: int, call: AttentionCall) -> None:
        self.last[layer], self.mean[layer] = attention_of(self.rows, call)

    def offer(self) -> dict[str, Any]:
        """The required features by name. Padding is included and 0."""
        made: dict[str, Any] = {}
        if FIRST in self.required_features:
            made[FIRST] = self.last[self.full[min(1, len(self.full) - 1)]].mean(1)
        if LAST in self.required_features:
            made[LAST] = self.mean[self.full[-1]].mean(1)
        if MEAN in self.required_features:
            made[MEAN] = torch.stack([self.mean[at].mean(1) for at in self.full]).mean(0)
        if HEADS in self.required_features:
            made[HEADS] = self.mean
        return made


def check_tappable(backbone: Reader) -> None:
    """Check that the attention of a model can be recorded. Raises ValueError."""
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


def is_sharded(model: Any) -> bool:
    """Whether a model holds only a share of its weights in this process."""
    return isinstance(model, PreTrainedModel) and (model.tp_size or 1) > 1


def check_whole(model: Any, what: str) -> None:
    """Refuse a sharded model, of which `what` is only present in part. Raises ValueError."""
    if is_sharded(model):
        raise ValueError(
            f"this recipe reads {what} of a {type(model).__name__}, of which each process holds a "
            "share; drop --shard-target, or choose another recipe, such as eagle-3"
        )


def tapped_layers(config: Any, required_features: frozenset[str]) -> list[int]:
    """The layers to record. Raises ValueError for a model without full attention."""
    if HEADS in required_features:
        crossed = cross_attention_layers(config)
        return [at for at in range(int(config.num_hidden_layers)) if at not in crossed]
    full = full_layers(config)
    if MEAN in required_features:
        return full
    first = [full[min(1, len(full) - 1)]] if FIRST in required_features else []
    return sorted({*first, *([full[-1]] if LAST in required_features else [])})


def full_layers(config: Any) -> list[int]:
    """Decoder layers with full attention to the text. Raises ValueError if there is none."""
    types = config.layer_types if getattr(config, "layer_types", None) else None
    crossed, every = cross_attention_layers(config), range(int(config.num_hidden_layers))
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
    query, key, count = call.query, call.key, max(rows, default=1)
    bias = call.bias(count)
    queries = call.scaled_queries(count)
    counts = torch.tensor(list(rows) or [1] * len(query), device=query.device)[:, None]
    back = torch.arange(count, 0, -1, device=query.device)  # the last query is 1 back
    weights = (back <= counts) / counts  # (B, R)
    mean = query.new_zeros(len(query), key.shape[1], key.shape[2], dtype=torch.float32)
    last = torch.zeros_like(mean)
    for group in range(key.shape[1]):
        keys = key[:, group, None].float().mT
        own = bias
        if bias is not None and bias.shape[1] > 1:
            own = bias.unflatten(1, (key.shape[1], -1))[:, group]
        for first in range(0, count, ROWS):
            lines = slice(first, first + ROWS)
            scores = queries[:, group, :, lines] @ keys  # (B, g, r, S)
            if own is not None:
                scores = scores + own[:, :, lines]
            attention = scores.softmax(-1).mean(1)
            mean[:, group] += (attention * weights[:, lines, None]).sum(1)
            last[:, group] = attention[:, -1]
    return last, mean


def count_question_tokens(inputs: Mapping[str, Any], visual: Sequence[int]) -> list[int]:
    """Count the tokens after the last of the `visual` ids per row; 1 in a row without any."""
    ids = inputs.get("input_ids")
    if ids is None:
        return []
    known = set(visual)
    rows = []
    for row in ids.tolist():
        text = next((at for at, token in enumerate(reversed(row)) if token in known), 1)
        rows.append(max(text, 1))
    return rows


class ClassTokenTap(KernelTap):
    """Context manager that records the attention of the class token while images are encoded.

    Taken in the layer of the vision tower whose output the model uses. Raises ValueError at
    construction for a tower without a class token before one feature per placeholder.
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
        self.attention: list[Tensor] = []  # per image (n,)
        self._seen = 0

    def record_call(self, call: AttentionCall) -> None:
        if self._seen == self.call:
            self.attention = list(_class_attention(call))
        self._seen += 1


def _class_attention(call: AttentionCall) -> Tensor:  # (images, n)
    """Attention of the first query, mean over heads, without its own share."""
    scores = call.query[:, :, :1].float() @ call.key.float().mT * call.factor
    attention: Tensor = scores.softmax(-1).mean(1)
    return attention[:, 0, 1:]
