"""Rows of a network call, split over processes: a window of states on several devices.

    window      x3  x4  x5  x6  x7        five states, of which
    process 0   x3  x4  x5                the first three
    process 1               x6  x7  x7    the others; the last one fills up

All processes draft and verify the same states from the same noise, and exchange predictions only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmspec.distributions.kernels import GaussianKernel
from mmspec.errors import check_number, format_value
from mmspec.targets.continuous.denoising import ChainTarget, Denoiser, Prediction


@dataclass(frozen=True)
class SplitRows:
    """Splits every network call evenly over the processes of a group: `max_rows=SplitRows(8)`.

    Each process holds the network and makes the same call, seed included. `max_rows` limits one
    forward of one process (None: its whole share); `group` is one of `torch.distributed` (None: all
    processes). Every process computes as many states as the others; the last ones repeat a state
    where they have none. With the rows of one state as `max_rows`, results are bit for bit those of
    one process with the same `max_rows`; otherwise forwards have other shapes and round otherwise.

    Raises ValueError where no process group was started, and for a group without this process.
    """

    max_rows: int | None = None
    group: Any = None

    def __post_init__(self) -> None:
        if self.max_rows is not None:
            check_number("max_rows", self.max_rows, 1, whole=True, example=8)
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "SplitRows() splits calls over processes, and no process group was started; start "
                "the program by torchrun and call torch.distributed.init_process_group(), or give "
                "max_rows= a number"
            )
        if not isinstance(self.group, dist.ProcessGroup | None):
            raise ValueError(
                f"group={format_value(self.group)} must be a group of torch.distributed that has "
                "this process; or leave it out for all processes"
            )

    @property
    def size(self) -> int:
        """Number of processes."""
        return dist.get_world_size(self.group)

    @property
    def total(self) -> int | None:
        """The maximal rows of one forward of all processes together."""
        return None if self.max_rows is None else self.max_rows * self.size

    def target(self, denoiser: Denoiser) -> ChainTarget:
        """The target whose calls are split. Raises ValueError if `max_rows` holds no state."""
        whole, width = ChainTarget(denoiser, self.max_rows), denoiser.width
        rows = None if self.max_rows is None else self.max_rows // width * width * self.size
        return replace(whole, denoiser=SplitDenoiser(denoiser, self.group), max_rows=rows)


@dataclass(frozen=True)
class SplitDenoiser:
    """A denoiser that computes its share of the states, and receives the other shares.

    Raises ValueError, in all processes, where they do not predict in the same states, and
    ConnectionError where one of them has ended.
    """

    denoiser: Denoiser
    group: Any = None

    @property
    def kernel(self) -> GaussianKernel:
        return self.denoiser.kernel

    @property
    def width(self) -> int:
        return self.denoiser.width

    def predict(self, states: Tensor, step: Tensor, row: Tensor) -> Prediction:
        size, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        self._check_agreement(states, step, row)
        share = -(-len(states) // size)
        own = torch.arange(rank * share, (rank + 1) * share, device=states.device)
        own = own.clamp_max(len(states) - 1)
        found = self.denoiser.predict(states[own], step[own], row[own])
        clean = self._gather(found.clean)[: len(states)]
        std = None if found.std is None else self._gather(found.std)[: len(states)]
        return Prediction(clean, std)

    def _gather(self, own: Tensor) -> Tensor:  # (R, ...) -> (P R, ...)
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        try:
            dist.all_gather(parts, own.contiguous(), self.group)
        except RuntimeError as error:
            raise ConnectionError(
                f"process {dist.get_rank(self.group)} stops, since another of {len(parts)} has "
                "ended; correct what that one reports"
            ) from error
        return torch.cat(parts)

    def _check_agreement(self, states: Tensor, step: Tensor, row: Tensor) -> None:
        """Compare number, steps and bits of the states of all processes."""
        bits = states.float().contiguous().view(torch.int32).flatten().to(torch.int64)
        places = torch.arange(1, len(bits) + 1, device=bits.device)  # sums wrap around
        order = torch.arange(1, len(step) + 1, device=step.device)
        sums = ((bits * places).sum(), ((step * 65537 + row) * order).sum())
        own = torch.stack((step.new_tensor(len(step)), step.min(), step.max(), *sums))
        seen = self._gather(own[None]).tolist()
        if any(one != seen[0] for one in seen):
            shown = ", ".join(
                f"process {rank} has {count} at steps {first} to {last} (checksum {values % 10**6})"
                for rank, (count, first, last, values, _) in enumerate(seen)
            )
            raise ValueError(
                f"the processes do not predict in the same states: {shown}; give every process the "
                "same weights, arguments and seed="
            )
