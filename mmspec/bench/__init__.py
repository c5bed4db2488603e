"""Measuring and certifying: what `mmspec bench` and `mmspec certify` run."""

from mmspec.bench.certificate import Certificate
from mmspec.bench.certify import certify
from mmspec.bench.compare import Comparison, compare
from mmspec.bench.growth import Growth, growth
from mmspec.bench.scale import Scale, scale
from mmspec.bench.workload import Workload

__all__ = [
    "Certificate",
    "Comparison",
    "Growth",
    "Scale",
    "Workload",
    "certify",
    "compare",
    "growth",
    "scale",
]
