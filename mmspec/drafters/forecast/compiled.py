"""Networks that torch.compile has compiled, under forecasts.

What decides about steps is Python that changes from step to step; compiled with the network it
would be compiled anew in every step. So it stays outside of compiled code, at the module that the
pipeline calls, and inside of it only whole modules are compiled:

    output forecast (lite, unchecked)   a step in full is the compiled network as it is
    layers forecast                     the network runs uncompiled, but its layers compiled, with
                                        the backend and the options that the network was given

Outputs of compiled modules are copied before they are remembered: with CUDA graphs the next call
would write over them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from mmspec.drafters.forecast.features import like, tensors


def own(network: nn.Module) -> nn.Module:
    """The network itself, where it is wrapped by `torch.compile(network)`."""
    return dict(network.named_children()).get("_orig_mod", network)


def compiler_of(network: nn.Module) -> Callable[..., Any] | None:
    """What compiles a function as `network` was compiled; None where it was not."""
    if own(network) is network:
        return None
    compiling: Any = network.dynamo_ctx

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return copied(compiling(function))

    return compiled


def copied(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose output is its own memory."""

    def call(*args: Any, **kwargs: Any) -> Any:
        output = function(*args, **kwargs)
        return like(output, [part.clone() for part in tensors(output)])

    return call


def check_layers(network: nn.Module) -> None:
    """Raises ValueError where layers to forecast are compiled in place, with what is around them.

    Of `module.compile()` torch keeps no options, and what it compiled cannot be entered.
    """
    for name, module in network.named_modules():
        if module._compiled_call_impl is not None:
            raise ValueError(
                f"{name or type(network).__name__} of the network is compiled in place, by "
                "compile() or compile_repeated_blocks(), and forecasts inside it would be compiled "
                "anew in every step; compile the network as pipe.transformer = "
                "torch.compile(pipe.transformer), of which the layers stay compiled, or use the "
                "recipe taylorseer with lite=True"
            )
