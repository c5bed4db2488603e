"""Attention kernels for keys that grow with every call.

On recent NVIDIA GPUs torch's `scaled_dot_product_attention` prefers cuDNN, which makes a plan for
every shape and stride of its inputs and keeps it. A decoding loop has new ones in every call: on an
H100 each took some 40 milliseconds on the host, while a forward of seven billion parameters takes
21 to launch (torch 2.11, bfloat16). The other kernels need no plan.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import Any, TypeVar, cast

from torch.backends import cuda
from torch.cuda import is_initialized

F = TypeVar("F", bound=Callable[..., Any])


class Unplanned:
    """A context without cuDNN's attention: torch's switch, which holds for all threads, is off."""

    def __init__(self) -> None:
        self.lock, self.rounds, self.was_on = Lock(), 0, False

    def __enter__(self) -> None:
        with self.lock:
            if not self.rounds:
                self.was_on = cuda.cudnn_sdp_enabled() and _has_others()
                if self.was_on:
                    cuda.enable_cudnn_sdp(False)
            self.rounds += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.rounds -= 1
            if not self.rounds and self.was_on:
                cuda.enable_cudnn_sdp(True)


def _has_others() -> bool:
    """Whether the user has left another kernel on."""
    return bool(
        cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.math_sdp_enabled()
    )


UNPLANNED = Unplanned()


def without_plans(step: F) -> F:
    """Run a method without cuDNN's attention if its object says that its `keys_grow`."""

    @wraps(step)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not (self.keys_grow and is_initialized()):
            return step(self, *args, **kwargs)
        with UNPLANNED:
            return step(self, *args, **kwargs)

    return cast(F, run)
