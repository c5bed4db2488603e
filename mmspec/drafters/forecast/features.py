"""The outputs of a denoising network that are forecast, and the override of module forwards.

Forecast are the outputs of attention and feed-forward layers, before the gates of adaptive layer
norms: gates, shifts and residual sums are computed in every step, with the true time. A block that
has the parts of such a layer as its own children (FLUX single-stream, PRX) is forecast at their
last projection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import update_wrapper
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mmspec.drafters.forecast.forecast import Factors

_STACKS = (
    *("joint_transformer_blocks", "transformer_blocks", "single_transformer_blocks"),
    *("blocks", "layers", "double_blocks"),
)
_ATTENTION = (
    *("attn", "attn1", "attn2", "attention"),
    *("self_attn", "cross_attn", "self_attention", "cross_attention"),
)
_FEED_FORWARD = ("ff", "ffn", "feed_forward", "ff_context", "mlp", "img_mlp", "txt_mlp")
_LAYERS = (*_ATTENTION, *_FEED_FORWARD)
_FUSED = {  # projections that end a layer, and its other parts, which are idle in a forecast
    "proj_out": ("proj_mlp", "attn", "act_mlp"),
    "down_proj": ("gate_proj", "up_proj"),
    "ff_out": ("ff_in",),
}
_SHARED = ("txt_ids", "img_ids", "image_rotary_emb")  # one for all rows, whatever their length


class Feature(Protocol):
    """The output of one module, over the steps of one chain."""

    def record(self, output: Any, scale: Tensor, rows: Tensor | None) -> None: ...
    def forecast(self, weights: Tensor) -> Any: ...


@dataclass
class Forecast:
    """An output that is extrapolated; tuples and diffusers outputs part by part."""

    parts: list[Factors] = field(default_factory=list)
    template: Any = None

    def record(self, output: Any, scale: Tensor, rows: Tensor | None) -> None:
        found = tensors(output)
        if not self.parts:
            self.parts, self.template = [Factors() for _ in found], output
        for part, feature in zip(self.parts, found, strict=True):
            part.record(feature, scale, rows)

    def forecast(self, weights: Tensor) -> Any:
        return rebuild_output(self.template, [part.forecast(weights) for part in self.parts])


@dataclass
class Idle:
    """An output that is not used while a later one is forecast: zeros, without storage."""

    template: Any = None

    def record(self, output: Any, scale: Tensor, rows: Tensor | None) -> None:
        if self.template is None:
            self.template = output

    def forecast(self, weights: Tensor) -> Any:
        zeros = [part.new_zeros(()).expand(part.shape) for part in tensors(self.template)]
        return rebuild_output(self.template, zeros)


@dataclass(frozen=True)
class ForecastModules:
    """The modules of a network that are forecast."""

    modules: tuple[tuple[nn.Module, type[Forecast] | type[Idle]], ...]
    last: nn.Module | None  # the block whose forecast is checked


def find_modules(network: nn.Module, lite: bool = False) -> ForecastModules:
    """The layers of all blocks of a transformer.

    With `lite`: the layers of the last block, and the output of the block before it, which replaces
    all earlier ones. Raises ValueError where there are no blocks of a known type.
    """
    blocks = transformer_blocks(network)
    found: list[tuple[nn.Module, type[Forecast] | type[Idle]]] = []
    if lite:
        found += [(block, Idle) for block in blocks[:-2]]
        found += [(block, Forecast) for block in blocks[-2:-1]]
    for block in blocks[-1:] if lite else blocks:
        layers = _block_layers(block)
        if not layers:
            raise ValueError(
                f"a {type(block).__name__} has none of {', '.join(_LAYERS)} to forecast; use "
                "lite=True, which forecasts the output of the whole network"
            )
        found += layers
    if not blocks:
        raise ValueError(
            f"{type(network).__name__} is not a stack of transformer blocks; use lite=True with "
            "the recipe taylorseer, which forecasts the output of the whole network, or for a "
            "U-Net the recipe deep-cache"
        )
    return ForecastModules(tuple(found), blocks[-1])


def _block_layers(block: nn.Module) -> list[tuple[nn.Module, type[Forecast] | type[Idle]]]:
    """The attention and feed-forward layers of a block."""
    inside = dict(block.named_children())
    fused = {last: parts for last, parts in _FUSED.items() if {last, parts[0]} <= inside.keys()}
    idle = [name for parts in fused.values() for name in parts if name in inside]
    kept = [name for name in _LAYERS if name in inside and name not in idle]
    return [(inside[name], Idle) for name in idle] + [
        (inside[name], Forecast) for name in (*kept, *fused)
    ]


def attention_layers(block: nn.Module) -> list[nn.Module]:
    """The attention layers of a block, self-attention first."""
    inside = dict(block.named_children())
    return [inside[name] for name in _ATTENTION if name in inside]


def transformer_blocks(network: nn.Module) -> list[nn.Module]:
    """The transformer blocks of a network, in execution order."""
    stacks = [stack for name, stack in network.named_children() if name in _STACKS]
    return [block for stack in stacks if isinstance(stack, nn.ModuleList) for block in stack]


def tensors(output: Any) -> list[Tensor]:
    """The tensors of an output, in order."""
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, Mapping) else output
    nested = [value for value in values if isinstance(value, Tensor | list | tuple)]
    return [part for value in nested for part in tensors(value)]


def rebuild_output(template: Any, parts: list[Tensor]) -> Any:
    """An output with the structure of `template` and other tensors."""
    return _fill_template(template, iter(parts))


def _fill_template(template: Any, fresh: Iterator[Tensor]) -> Any:
    if isinstance(template, Tensor):
        return next(fresh)
    if isinstance(template, Mapping):
        return type(template)(
            **{name: _fill_template(part, fresh) for name, part in template.items()}
        )
    if isinstance(template, list | tuple):
        return type(template)(_fill_template(part, fresh) for part in template)
    return template


class ForwardOverride:
    """Replaces the forward of a module by one that can call the original; `restore` undoes it."""

    def __init__(
        self,
        module: nn.Module,
        body: Callable[..., Any],
        compile_with: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> None:
        """`body(original, *args, **kwargs)` is the new forward; `compile_with` compiles `original`.

        A module that is compiled in place is called through its compiled call, which is replaced
        instead.
        """
        update_wrapper(self, module.forward)  # keeps the signature, which pipelines inspect
        self.place = "forward" if module._compiled_call_impl is None else "_compiled_call_impl"
        self.module, self.body, self.replaced = module, body, getattr(module, self.place)
        self.original = self.replaced if compile_with is None else compile_with(self.replaced)
        self.had_own = self.place in vars(module)
        setattr(module, self.place, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self.original, *args, **kwargs)

    def restore(self) -> None:
        if self.had_own:
            setattr(self.module, self.place, self.replaced)
        else:
            delattr(self.module, self.place)


def is_overridden(module: nn.Module) -> bool:
    return any(
        isinstance(one, ForwardOverride) for one in (module.forward, module._compiled_call_impl)
    )


def select_rows(value: Any, rows: Tensor, count: int) -> Any:
    """The part of a network's argument that belongs to some of its `count` rows."""
    if isinstance(value, Tensor):
        return value[rows] if value.dim() and value.shape[0] == count else value
    if isinstance(value, Mapping):
        return {
            name: part if name in _SHARED else select_rows(part, rows, count)
            for name, part in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(select_rows(part, rows, count) for part in value)
    return value


def replace_rows(base: Any, part: Any, rows: Tensor) -> Any:
    """An output in which `rows` (R',) are replaced by those of `part`."""
    pairs = zip(tensors(base), tensors(part), strict=True)
    return rebuild_output(base, [whole.index_copy(0, rows, new) for whole, new in pairs])


def flatten_groups(output: Any, groups: int) -> Tensor:
    """All values of each group of rows, (G, M) float32; row r belongs to group r mod G.

    Guidance by doubling the batch puts the two rows of a sample G rows apart.
    """
    flat = torch.cat([part.flatten(1).float() for part in tensors(output)], 1)
    return flat.reshape(-1, groups, flat.shape[1]).transpose(0, 1).flatten(1)
