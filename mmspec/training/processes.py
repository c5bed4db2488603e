"""Data-parallel training: each process computes a share of every step's examples.

    accelerate launch --num_processes 2 -m mmspec.cli train eagle-3 --accumulate 2 ...

(`torchrun --nproc-per-node 2` on CPUs, where accelerate launches one process.) Each process holds
target and head; gradients are averaged, so all make the same updates. A sharded target is held by
all together, which then compute the same. Needs Hugging Face's `accelerate`:
`pip install mmspec[train]`.

Between steps processes wait for each other in a group with a time limit of its own, since
generation and measurements may take longer than the limit of collective operations.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")
_LAUNCHED = "WORLD_SIZE"  # environment variable of launchers
_PATIENCE = timedelta(days=30)  # a process that ended is noticed at once


@dataclass(frozen=True)
class Processes:
    """The processes of a training; a single one by default."""

    state: Any = None  # accelerate's `PartialState`; None = single process
    group: Any = None  # of all processes, in which they wait for each other
    is_sharded: bool = False  # whether they hold one target together

    @classmethod
    def from_environment(cls, is_sharded: bool = False) -> Processes:
        """Read the launcher's environment.

        Raises ValueError without accelerate, and for a sharded target in a single process.
        """
        if int(os.environ.get(_LAUNCHED, "1")) == 1:
            if is_sharded:
                raise ValueError(
                    "--shard-target splits the target over several processes, and one was "
                    "launched; start it by torchrun --nproc-per-node 2, or drop it"
                )
            return cls()
        try:
            from accelerate import PartialState
        except ImportError as error:
            raise ValueError(
                f"{os.environ[_LAUNCHED]} processes were launched, which need accelerate to train "
                "together; install mmspec[train], or launch one"
            ) from error
        state = PartialState(cpu=not torch.cuda.is_available())
        group = torch.distributed.new_group(timeout=_PATIENCE, backend="gloo")
        return cls(state, group, is_sharded)

    @property
    def size(self) -> int:
        """Number of processes."""
        return 1 if self.state is None else int(self.state.num_processes)

    @property
    def count(self) -> int:
        """Number of shares; 1 with a sharded target."""
        return 1 if self.is_sharded else self.size

    @property
    def index(self) -> int:
        """Number of this process's share."""
        return 0 if self.is_sharded else self.rank

    @property
    def is_first(self) -> bool:
        """Whether this process reports and writes checkpoints."""
        return self.rank == 0

    @property
    def measures(self) -> bool:
        """Whether this process takes part in measurements: all do with a sharded target."""
        return self.is_first or self.is_sharded

    @property
    def writes(self) -> bool:
        """Whether this process writes its share: one of those with the same share does."""
        return self.is_first or not self.is_sharded

    @property
    def rank(self) -> int:
        """Number of this process."""
        return 0 if self.state is None else int(self.state.process_index)

    @property
    def device(self) -> torch.device | None:
        """Device of this process; None = unchanged."""
        return None if self.state is None else self.state.device

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Select the items of this process."""
        return items[self.index :: self.count]

    def gather(self, own: T) -> list[T]:
        """Return the values of all processes, in their order.

        Raises ConnectionError where one of them has ended.
        """
        if self.group is None:
            return [own]
        found: list[Any] = [None] * self.size
        with self._notice_ends():
            torch.distributed.all_gather_object(found, own, self.group)
        return found

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Context in which the main process runs first, the others after it."""
        if not self.is_first:
            self.wait()
        yield
        if self.is_first:
            self.wait()

    def wait(self) -> None:
        """Wait for all processes, however long they generate or measure.

        Raises ConnectionError where one of them has ended.
        """
        if self.group is not None:
            with self._notice_ends():
                torch.distributed.barrier(self.group)

    @contextmanager
    def _notice_ends(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise ConnectionError(
                f"process {self.rank} stops, since another of {self.size} has ended; correct "
                "what that one reports, and repeat the command: it resumes"
            ) from error

    def average_gradients(self, trainable: Sequence[nn.Parameter], loss: float) -> float:
        """Average the gradients of all processes in place; return the mean of their losses.

        Parameters without a gradient in all processes keep none.
        """
        if self.state is None:
            return loss
        given = [one.new_zeros(()) if one.grad is None else one.new_ones(()) for one in trainable]
        grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in trainable]
        first = grads[0]
        flat = [*(one.flatten().to(first) for one in grads), first.new_tensor([loss])]
        mean = self._mean(torch.cat((*flat, torch.stack(given).to(first))))
        *parts, losses, shares = mean.split([*map(len, flat), len(given)])
        for one, part, share in zip(trainable, parts, shares.tolist(), strict=True):
            one.grad = part.view_as(one).to(one) if share > 0 else None
        return float(losses)

    def _mean(self, own: Tensor) -> Tensor:
        from accelerate.utils import reduce

        found: Tensor = reduce(own, reduction="mean")
        return found
