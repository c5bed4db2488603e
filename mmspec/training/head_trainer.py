"""Training steps that resume bit for bit from a checkpoint.

A checkpoint holds the weights, their averages and the optimiser state. Learning rate, noise and
data order (`ShuffledBatches`) are functions of the step number.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from mmspec.models.compatibility import sign_head
from mmspec.targets.readers.reader import Reader
from mmspec.training.fitting import ScheduledOptimizer
from mmspec.training.heads import TrainingExample
from mmspec.training.processes import Processes
from mmspec.training.trainable import DrafterTraining


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of a training; `ema` is the decay of the averaged weights, 0 = none."""

    steps: int
    rate: float
    seed: int = 0
    ema: float = 0.0
    bf16: bool = False  # computation of the head; its weights stay float32
    muon: bool = False  # for weight matrices, at 13 times the rate


class HeadTrainer:
    """Trains a head for its frozen target.

    Raises ValueError at construction for a head of another target.
    """

    def __init__(
        self,
        training: DrafterTraining,
        reader: Reader,
        head: Any,
        settings: TrainingSettings,
        processes: Processes | None = None,
    ) -> None:
        training.check(head, reader)
        self.processes = Processes() if processes is None else processes
        sign_head(head, reader)
        self.training, self.reader, self.settings = training, reader, settings
        self.head = head.float().to(reader.device).train()
        options = (settings.steps, settings.rate, settings.muon)
        self.stages = training.stages(self.head, *options)
        self.average = _copy_parameters(self.head) if settings.ema else {}

    @property
    def num_steps_done(self) -> int:
        """Number of steps so far."""
        return sum(stage.num_steps_done for stage in self.stages)

    @property
    def rate(self) -> float:
        """Learning rate of the next step."""
        stage = self._stage()
        return float(stage.peak_rates[0]) * stage.rate_factor(stage.num_steps_done)

    def step(self, examples: Sequence[Callable[[], TrainingExample]]) -> float:
        """Make one step by the mean loss of examples, which are loaded one after the other.

        All processes are given the same examples, and each computes an equal share. Raises
        ValueError for a non-finite loss; the step must then be discarded.
        """
        own = self.processes.share(list(enumerate(examples)))
        losses = [partial(self._loss, number, make) for number, make in own]
        with torch.random.fork_rng(devices=_devices(self.reader)):
            loss = self._stage().step(losses, self.processes.average_gradients)
        if not math.isfinite(loss):
            raise ValueError(
                f"the loss of step {self.num_steps_done} is {loss}; give a smaller --rate, and "
                "start again with another --out"
            )
        weight = 1 - self.settings.ema
        with torch.no_grad():
            for name, one in self.head.named_parameters():
                if name in self.average:
                    self.average[name].lerp_(one, weight)
        return loss

    def _stage(self) -> ScheduledOptimizer:
        """Return the stage of the next step; the last one continues beyond its steps."""
        unfinished = (stage for stage in self.stages if stage.num_steps_done < stage.decay.steps)
        return next(unfinished, self.stages[-1])

    def _optimisers(self) -> list[Optimizer]:
        return [optimiser for stage in self.stages for optimiser in stage.optimisers]

    def _loss(self, number: int, make: Callable[[], TrainingExample]) -> Tensor:
        torch.manual_seed(_derive_seed(self.settings.seed, self.num_steps_done, number))
        with self.arithmetic():
            return self.training.loss(self.reader, self.head, make()).float()

    def arithmetic(self) -> AbstractContextManager[Any]:
        """Context of a loss: autocast to the target's half precision, or bfloat16 with `bf16`."""
        own = self.reader.model.dtype
        if own == torch.float32 and not self.settings.bf16:
            return nullcontext()
        dtype = torch.bfloat16 if self.settings.bf16 or own == torch.float32 else own
        return torch.autocast(self.reader.device.type, dtype)

    def trained_head(self) -> Any:
        """Return a copy of the head in eval mode, with averaged weights if there are."""
        found = copy.deepcopy(self.head).train(False)
        with torch.no_grad():  # a shared weight has one average
            for name, one in found.named_parameters():
                if name in self.average:
                    one.copy_(self.average[name])
        return found

    def state(self) -> dict[str, Tensor]:
        """Return all tensors that the next step depends on."""
        found = {f"head.{name}": one for name, one in self.head.state_dict().items()}
        found |= {f"average.{name}": one for name, one in self.average.items()}
        for number, optimiser in enumerate(self._optimisers()):
            for key, tensors in optimiser.state_dict()["state"].items():
                for name, one in tensors.items():
                    found[f"optimiser.{number}.{key}.{name}"] = torch.as_tensor(one)
        return found

    def restore(self, state: Mapping[str, Tensor], taken: int) -> None:
        """Resume after `taken` steps. Raises ValueError for the state of another head."""
        parts: dict[str, dict[str, Tensor]] = {"head": {}, "average": {}, "optimiser": {}}
        for name, one in state.items():
            part, _, rest = name.partition(".")
            parts.setdefault(part, {})[rest] = one.to(self.reader.device)
        if parts["head"].keys() != self.head.state_dict().keys():
            raise ValueError(
                "the checkpoint is of another head; give the same options, or another --out"
            )
        self.head.load_state_dict(parts["head"])
        for name, one in self.average.items():
            one.copy_(parts["average"][name])
        for number, optimiser in enumerate(self._optimisers()):
            memory: dict[int, dict[str, Tensor]] = {}
            for name, one in parts["optimiser"].items():
                owner, key, rest = name.split(".", 2)
                if int(owner) == number:
                    memory.setdefault(int(key), {})[rest] = one.cpu() if rest == "step" else one
            optimiser.load_state_dict({**optimiser.state_dict(), "state": memory})
        for stage in self.stages:
            stage.num_steps_done = (
                taken if stage is self.stages[-1] else min(taken, stage.decay.steps)
            )
            taken -= stage.num_steps_done


class ShuffledBatches:
    """Batches of item indices, in a new order every epoch.

    Items in a batch have similar `sizes`, for little padding, and the same group in `groups`.
    """

    def __init__(
        self, sizes: Sequence[int], groups: Sequence[Any], batch: int, seed: int = 0
    ) -> None:
        self.sizes, self.groups, self.batch, self.seed = sizes, groups, batch, seed
        self.epoch, self.batches = 0, self._draw_batches(0)

    def at(self, number: int) -> list[int]:
        """Return the items of batch `number`, counted over epochs."""
        epoch, place = divmod(number, len(self.batches))
        if epoch != self.epoch:
            self.epoch, self.batches = epoch, self._draw_batches(epoch)
        return self.batches[place]

    def _draw_batches(self, epoch: int) -> list[list[int]]:
        """Make the batches of an epoch; their number is the same in all epochs."""
        generator = np.random.default_rng((self.seed, epoch))
        order = generator.permutation(len(self.sizes)).tolist()
        batches: list[list[int]] = []
        for group in sorted(set(self.groups)):
            own = [item for item in order if self.groups[item] == group]
            for start in range(0, len(own), 8 * self.batch):
                near = sorted(own[start : start + 8 * self.batch], key=lambda one: self.sizes[one])
                batches += [near[at : at + self.batch] for at in range(0, len(near), self.batch)]
        return [batches[at] for at in generator.permutation(len(batches)).tolist()]


def _copy_parameters(head: Any) -> dict[str, Tensor]:
    named = head.named_parameters()
    return {name: one.detach().clone() for name, one in named if one.requires_grad}


def _derive_seed(seed: int, step: int, example: int) -> int:
    return int(np.random.SeedSequence((seed, step, example)).generate_state(1)[0])


def _devices(reader: Reader) -> list[torch.device]:
    return [reader.device] if reader.device.type == "cuda" else []
