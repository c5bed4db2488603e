"""Forecasting on networks compiled by torch.compile.

The decision about a step is Python code that changes from step to step and would force a
recompilation of the network. So it stays outside of compiled code, in the module that the pipeline
calls, and inside the network only whole modules are compiled:

    output forecast (lite, unchecked)   a full step is the compiled network as it is
    layers forecast                     the network runs uncompiled, its layers compiled, with the
                                        backend and options of the network

Outputs of compiled modules are copied before they are stored: with CUDA graphs the next call would
overwrite them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from mmspec.drafters.forecast.features import rebuild_output, tensors


def unwrap_compiled(network: nn.Module) -> nn.Module:
    """The network itself, if it is wrapped by `torch.compile(network)`."""
    return dict(network.named_children()).get("_orig_mod", network)


def compiler_of(network: nn.Module) -> Callable[..., Any] | None:
    """A function that compiles with the options of `network`; None if it is not compiled."""
    if unwrap_compiled(network) is network:
        return None
    compiling: Any = network.dynamo_ctx

    def compile_function(function: Callable[..., Any]) -> Callable[..., Any]:
        return copy_output(compiling(function))

    return compile_function


def copy_output(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to return a copy of its output."""

    def call(*args: Any, **kwargs: Any) -> Any:
        output = function(*args, **kwargs)
        return rebuild_output(output, [part.clone() for part in tensors(output)])

    return call


def check_layers(network: nn.Module) -> None:
    """Raises ValueError where layers to forecast are compiled in place with their surroundings.

    torch keeps no options of `module.compile()`, and its compiled code cannot be split.
    """
    for name, module in network.named_modules():
        if module._compiled_call_impl is not None:
            raise ValueError(
                f"{name or type(network).__name__} of the network is compiled in place, by "
                "compile() or compile_repeated_blocks(), and forecasts inside it would be "
                "recompiled in every step; compile the network as pipe.transformer = "
                "torch.compile(pipe.transformer), which keeps the layers compiled, or use the "
                "recipe taylorseer with lite=True"
            )
