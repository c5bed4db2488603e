"""A pipeline's own call with the noise of a chain: what decoding must give back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mmspec.distributions.noise import KeyedNoise


@contextmanager
def replay_noise(
    scheduler: Any, images: int, generator: torch.Generator, free: Tensor | None = None
) -> Iterator[None]:
    """Give a scheduler the noise that decoding draws with the same generator.

    That is keyed by a number drawn from the generator after the first state, and drawn for the
    places `free` (*E) bool, if not for all. `randn_tensor` of the scheduler's module is replaced
    meanwhile, so that nothing else in the process may sample with that scheduler.
    """
    drawn: list[KeyedNoise] = []
    states = [0]

    def replayed(shape: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> Tensor:
        if not drawn:
            seed = int(torch.randint(2**62, (), generator=generator))
            drawn.append(KeyedNoise.from_seed(seed, images, torch.device("cpu")))
        states[0] += 1
        keys = drawn[0].shared_keys(torch.full((images, 1), states[0]))
        if free is None:
            noise = keys.normal(*shape[1:])[:, 0].to(dtype)
        else:
            noise = torch.zeros(images, *shape[1:])
            noise[:, free] = keys.normal(int(free.sum()))[:, 0]
        return noise.repeat(shape[0] // images, *(1,) * (noise.dim() - 1))

    module: Any = sys.modules[type(scheduler).__module__]
    own = getattr(module, "randn_tensor", None)
    if own is None:  # of a scheduler without noise
        yield
        return
    module.randn_tensor = replayed
    try:
        yield
    finally:
        module.randn_tensor = own
