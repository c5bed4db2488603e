"""A small policy of the real class with its processor, and what its camera sees."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

import mmspec
from mmspec.models.prismatic_processor import PrismaticProcessor
from tests.models.test_prismatic_processor import words
from tests.toys import prismatic

SIZE = 7


@cache
def policy() -> Any:
    """A random one; nobody writes on it."""
    return prismatic.openvla()


@cache
def processor() -> PrismaticProcessor:
    return PrismaticProcessor.of(policy(), words())


def fast(recipe: str = "prompt-lookup", **parts: Any) -> mmspec.Accelerated:
    return mmspec.accelerate(policy(), recipe, **{"processor": processor(), **parts})


def picture(seed: int = 0, height: int = 48, width: int = 64) -> np.ndarray:
    """(H, W, 3) of uint8."""
    noise = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), np.uint8)
    return noise.repeat(8, 0).repeat(8, 1)
