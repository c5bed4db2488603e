"""Devices of the cost model: limits of data sheets, and the share of them that is reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mmspec.errors import check_number

MICROSECOND = 1e-6


@dataclass(frozen=True)
class Device:
    """One device and its links. The achieved rates are those of the data sheet times a share."""

    name: str
    flops: float  # dense, per second, in the dtype of `bytes_per_value`
    bandwidth: float  # bytes per second of its memory
    memory: float  # bytes
    bytes_per_value: int = 2
    compute_share: float = 1.0  # of `flops` that matrix products reach
    memory_share: float = 1.0  # of `bandwidth` that reading weights and caches reaches
    overlaps: bool = True  # whether it computes while it reads, or one after the other
    layer_seconds: float = 0.0  # per layer of a forward, whatever its size: launches
    round_seconds: float = 0.0  # of the host per round: verification, one transfer
    row_seconds: float = (
        0.0  # of the host per round and row: its tokens, stop conditions, statistics
    )
    link_bandwidth: float = 0.0  # bytes per second and direction, within a node
    link_seconds: float = 0.0  # latency of one message within a node
    node_bandwidth: float = 0.0  # bytes per second and direction and device, between nodes
    node_seconds: float = 0.0
    devices_per_node: int = 8
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("flops", "bandwidth", "memory", "compute_share", "memory_share"):
            check_number(name, getattr(self, name), 1e-9, example=1.0)
        for name in ("layer_seconds", "round_seconds", "row_seconds", "link_seconds"):
            check_number(name, getattr(self, name), 0, example=1e-5)

    def host(self, rows: int) -> float:
        """Seconds of the host per round of so many rows."""
        return self.round_seconds + rows * self.row_seconds

    def all_reduce(self, size: float, devices: int) -> float:
        """Seconds of a ring all-reduce of `size` bytes (alpha-beta model; Thakur et al. 2005).

        2 (n - 1) messages of size / n: alpha is the latency of one, beta the bandwidth of a link.
        Beyond one node the slower links between nodes count. Raises ValueError for a device without
        links.
        """
        if devices == 1:
            return 0.0
        is_inside = devices <= self.devices_per_node
        beta = self.link_bandwidth if is_inside else self.node_bandwidth
        alpha = self.link_seconds if is_inside else self.node_seconds
        if not beta:
            raise ValueError(
                f"{self.name} has no links for tensor parallel over {devices} devices; give "
                "one device, or another kind"
            )
        return 2 * (devices - 1) * (alpha + size / devices / beta)


# Shares and latencies of the accelerators are assumptions, not measurements: none was there. Layers
# without launch overhead assume captured graphs. The seconds of the host are those of an `Engine`
# on a cloud CPU, with a model of four narrow layers.
ROUND_SECONDS, ROW_SECONDS = 800 * MICROSECOND, 60 * MICROSECOND
H100 = Device(
    "h100",
    flops=989e12,
    bandwidth=3.35e12,
    memory=80e9,
    compute_share=0.6,
    memory_share=0.75,
    layer_seconds=20 * MICROSECOND,
    round_seconds=ROUND_SECONDS,
    row_seconds=ROW_SECONDS,
    link_bandwidth=450e9,
    link_seconds=3 * MICROSECOND,
    node_bandwidth=50e9,
    node_seconds=10 * MICROSECOND,
    source="NVIDIA H100 SXM data sheet: 989 TFLOPS bfloat16 dense, 3.35 TB/s, 900 GB/s NVLink; "
    "400 Gb/s InfiniBand per GPU",
)
A100 = Device(
    "a100",
    flops=312e12,
    bandwidth=2.039e12,
    memory=80e9,
    compute_share=0.7,
    memory_share=0.75,
    layer_seconds=20 * MICROSECOND,
    round_seconds=ROUND_SECONDS,
    row_seconds=ROW_SECONDS,
    link_bandwidth=300e9,
    link_seconds=3 * MICROSECOND,
    node_bandwidth=25e9,
    node_seconds=10 * MICROSECOND,
    source="NVIDIA A100 SXM 80 GB data sheet: 312 TFLOPS bfloat16 dense, 2.039 TB/s, 600 GB/s "
    "NVLink; 200 Gb/s InfiniBand per GPU",
)
DEVICES: Mapping[str, Device] = {one.name: one for one in (H100, A100)}


def find_device(name: str) -> Device:
    """A device by name. Raises ValueError listing the known ones."""
    if name not in DEVICES:
        raise ValueError(f"unknown device {name!r}; known devices: {', '.join(DEVICES)}")
    return DEVICES[name]
