"""Drafting with the target's own layers in lower precision, on the target's own cache (QSpec)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.draft import Drafter
from mmspec.drafters.neural.shared import build_shared
from mmspec.recipe import Kit

PRECISIONS = ("int8", "int4", "bfloat16", "float16")
GROUP = 32  # weights that share a scale in 4 bits
CUDA_ROWS = 32  # of a product of integers on CUDA, at least


class Int8Linear(nn.Module):
    """A linear layer whose weights and activations have 8 bits (W8A8).

    Weights have a scale per output, activations one per token, measured in the call. The product is
    one of integers. Made from a layer with float weights, which is not changed.
    """

    weight: Tensor  # (in, out) int8
    scale: Tensor  # (out,)
    bias: Tensor | None  # (out,)

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        whole = linear.weight.detach().float()
        scale = whole.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
        self.register_buffer("weight", (whole / scale[:, None]).round().to(torch.int8).t())
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        rows = x.reshape(-1, x.shape[-1]).float()
        scale = rows.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127
        integers = (rows / scale).round().to(torch.int8)
        if x.is_cuda and len(rows) < CUDA_ROWS:  # the kernel takes no fewer
            integers = functional.pad(integers, (0, 0, 0, CUDA_ROWS - len(rows)))
        product = torch._int_mm(integers, self.weight)[: len(rows)]
        out = (product * scale * self.scale).to(x.dtype)
        out = out if self.bias is None else out + self.bias
        return out.view(*x.shape[:-1], -1)


class CastLinear(nn.Module):
    """A linear layer that computes in another dtype and returns that of its input."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = copy.deepcopy(linear).to(dtype)

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        out: Tensor = self.linear(x.to(self.linear.weight.dtype))
        return out.to(x.dtype)


def quantizer(precision: str) -> Callable[[nn.Linear], nn.Module]:
    """What makes the draft's layer of a linear layer. Raises ValueError for an unknown precision.

    "int8" rounds weights and activations to 8 bits; "int4" weights to 4 and activations to 8, by
    torchao; "bfloat16" and "float16" compute in that dtype.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r} is none of {', '.join(PRECISIONS)}; give one")
    if precision == "int8":
        return Int8Linear
    if precision == "int4":
        return _int4_linear()
    dtype: torch.dtype = vars(torch)[precision]
    return lambda linear: CastLinear(linear, dtype)


def _int4_linear() -> Callable[[nn.Linear], nn.Module]:
    if find_spec("torchao") is None:
        raise ValueError("precision='int4' needs torchao; install mmspec[quantize]")
    from torchao import quantization

    config = quantization.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=vars(torch)["int4"], weight_granularity=quantization.PerGroup(GROUP)
    )

    def quantize(linear: nn.Linear) -> nn.Module:
        if linear.in_features % GROUP:
            return linear
        twin = copy.copy(linear)
        twin._parameters = dict(linear._parameters)
        quantization.quantize_(twin, config)
        return twin

    return quantize


def quantized_self(kit: Kit) -> Drafter:
    """The target itself in lower precision."""
    return build_shared(kit, change=quantizer(kit.options["precision"]))
