"""Several processes that teach one head, each with a share of every step's lessons.

    accelerate launch --num_processes 2 -m mmspec.cli train eagle-3 --accumulate 2 ...

(`torchrun --nproc-per-node 2` on processors, where accelerate's command starts one.) Each holds the
target and the head; gradients are averaged, so all take the same steps. Needs Hugging Face's
`accelerate`: `pip install mmspec[train]`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")
_LAUNCHED = "WORLD_SIZE"  # what launchers tell every process


@dataclass(frozen=True)
class Processes:
    """Which of the processes of a training this is; the only one unless launched with others."""

    state: Any = None  # accelerate's `PartialState`; None = alone

    @classmethod
    def here(cls) -> Processes:
        """As this process was launched. Raises ValueError without accelerate."""
        if int(os.environ.get(_LAUNCHED, "1")) == 1:
            return cls()
        try:
            from accelerate import PartialState
        except ImportError as error:
            raise ValueError(
                f"{os.environ[_LAUNCHED]} processes were launched, and they cannot learn together "
                "without accelerate; install mmspec[train], or launch one"
            ) from error
        return cls(PartialState(cpu=not torch.cuda.is_available()))

    @property
    def count(self) -> int:
        return 1 if self.state is None else int(self.state.num_processes)

    @property
    def is_first(self) -> bool:
        """Whether this is the one that asks, judges and writes."""
        return self.state is None or bool(self.state.is_main_process)

    @property
    def device(self) -> torch.device | None:
        """Where its models belong; None = where they are."""
        return None if self.state is None else self.state.device

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Which of the items are its own."""
        return items if self.state is None else items[self.state.process_index :: self.count]

    def first_alone(self) -> AbstractContextManager[None]:
        """The first one does what stands within, and the others do it behind that."""
        if self.state is None:
            return nullcontext()
        found: AbstractContextManager[None] = self.state.main_process_first()
        return found

    def wait(self) -> None:
        """Until all have come as far."""
        if self.state is not None:
            self.state.wait_for_everyone()

    def gathered(self, learnt: Sequence[nn.Parameter], loss: float) -> float:
        """Average the gradients of all processes in place; the mean of their losses.

        What has no gradient in any process keeps none.
        """
        if self.state is None:
            return loss
        given = [one.new_zeros(()) if one.grad is None else one.new_ones(()) for one in learnt]
        told = [torch.zeros_like(one) if one.grad is None else one.grad for one in learnt]
        first = told[0]
        flat = [*(one.flatten().to(first) for one in told), first.new_tensor([loss])]
        mean = self._mean(torch.cat((*flat, torch.stack(given).to(first))))
        *parts, losses, shares = mean.split([*map(len, flat), len(given)])
        for one, part, share in zip(learnt, parts, shares.tolist(), strict=True):
            one.grad = part.view_as(one).to(one) if share > 0 else None
        return float(losses)

    def _mean(self, own: Tensor) -> Tensor:
        from accelerate.utils import reduce

        found: Tensor = reduce(own, reduction="mean")
        return found
