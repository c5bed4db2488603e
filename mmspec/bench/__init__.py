"""Benchmarks and certificates, as run by `mmspec bench` and `mmspec certify`."""

from mmspec.bench.certificate import Certificate, Check
from mmspec.bench.certify import certify
from mmspec.bench.compare import Comparison, compare
from mmspec.bench.row import Row
from mmspec.bench.studies.growth import Growth, growth
from mmspec.bench.studies.scale import Scale, scale

__all__ = [
    "Certificate",
    "Check",
    "Comparison",
    "Growth",
    "Row",
    "Scale",
    "certify",
    "compare",
    "growth",
    "scale",
]
