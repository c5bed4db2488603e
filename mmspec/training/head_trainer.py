"""The steps of a training that can be stopped and gone on with: the same weights, bit for bit.

Nothing depends on what came before but the weights, their averages and the optimiser's memory, all
of which a checkpoint holds: the rate and the noise follow from the number of a step, and so does
the order of the data (`Shuffle`).
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

from mmspec.models.fingerprint import sign
from mmspec.targets.readers.reader import Reader
from mmspec.training.fitting import Descent
from mmspec.training.heads import Lesson
from mmspec.training.processes import Processes
from mmspec.training.trainable import DrafterTraining


@dataclass(frozen=True)
class TrainingSettings:
    """How long a head is trained and how; `ema` is the decay of the averaged weights, 0 = none."""

    steps: int
    rate: float
    seed: int = 0
    ema: float = 0.0
    bf16: bool = False  # the head's arithmetic; its weights stay float32
    muon: bool = False  # for its weight matrices, at 13 times the rate


class HeadTrainer:
    """A head beside its frozen target, and how far it has learnt.

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
        sign(head, reader)
        self.training, self.reader, self.settings = training, reader, settings
        self.head = head.float().to(reader.device).train()
        how = (settings.steps, settings.rate, settings.muon)
        self.stages = training.stages(self.head, *how)
        self.average = _copied(self.head) if settings.ema else {}

    @property
    def taken(self) -> int:
        """Steps so far."""
        return sum(stage.taken for stage in self.stages)

    def step(self, lessons: Sequence[Callable[[], Lesson]]) -> float:
        """One step by the mean loss of lessons, which are made one after the other.

        Of several processes each makes its share; all are given the same lessons, as many for each.
        Raises ValueError for a loss that is no number; the step is not to be kept then.
        """
        own = self.processes.share(list(enumerate(lessons)))
        losses = [partial(self._loss, number, make) for number, make in own]
        with torch.random.fork_rng(devices=_devices(self.reader)):
            loss = self._stage().step(losses, self.processes.gathered)
        if not math.isfinite(loss):
            raise ValueError(
                f"the loss of step {self.taken} is {loss}; give a smaller --rate, and begin anew "
                "with another --out"
            )
        weight = 1 - self.settings.ema
        with torch.no_grad():
            for name, one in self.head.named_parameters():
                if name in self.average:
                    self.average[name].lerp_(one, weight)
        return loss

    def _stage(self) -> Descent:
        """The one that the next step belongs to; the last goes on where more is asked for."""
        under_way = (stage for stage in self.stages if stage.taken < stage.fall.steps)
        return next(under_way, self.stages[-1])

    def _optimisers(self) -> list[Optimizer]:
        return [optimiser for stage in self.stages for optimiser in stage.optimisers]

    def _loss(self, number: int, make: Callable[[], Lesson]) -> Tensor:
        torch.manual_seed(_mixed(self.settings.seed, self.taken, number))
        with self._arithmetic():
            return self.training.loss(self.reader, self.head, make()).float()

    def _arithmetic(self) -> AbstractContextManager[Any]:
        """In the target's precision where that is a half one, or in bfloat16 where it is asked."""
        own = self.reader.model.dtype
        if own == torch.float32 and not self.settings.bf16:
            return nullcontext()
        dtype = torch.bfloat16 if self.settings.bf16 or own == torch.float32 else own
        return torch.autocast(self.reader.device.type, dtype)

    def learnt(self) -> Any:
        """A copy of the head as it is used: averaged where averages are kept, in eval mode."""
        found = copy.deepcopy(self.head).train(False)
        with torch.no_grad():  # one by one: a weight with two names has an average under one
            for name, one in found.named_parameters():
                if name in self.average:
                    one.copy_(self.average[name])
        return found

    def state(self) -> dict[str, Tensor]:
        """All that the next step depends on."""
        found = {f"head.{name}": one for name, one in self.head.state_dict().items()}
        found |= {f"average.{name}": one for name, one in self.average.items()}
        for number, optimiser in enumerate(self._optimisers()):
            for key, memory in optimiser.state_dict()["state"].items():
                for name, one in memory.items():
                    found[f"optimiser.{number}.{key}.{name}"] = torch.as_tensor(one)
        return found

    def restore(self, state: Mapping[str, Tensor], taken: int) -> None:
        """Go on behind so many steps. Raises ValueError for a state of another head."""
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
            stage.taken = taken if stage is self.stages[-1] else min(taken, stage.fall.steps)
            taken -= stage.taken


class Shuffle:
    """Which items are read in which step: all of them, `batch` at a time, in a new order each time.

    Items of similar `sizes` stand in one batch, so that little is padding; those of different
    `sorts` never do.
    """

    def __init__(
        self, sizes: Sequence[int], sorts: Sequence[bool], batch: int, seed: int = 0
    ) -> None:
        self.sizes, self.sorts, self.batch, self.seed = sizes, sorts, batch, seed
        self.epoch, self.batches = 0, self._drawn(0)

    def at(self, number: int) -> list[int]:
        """The items of batch `number`, counted without end."""
        epoch, place = divmod(number, len(self.batches))
        if epoch != self.epoch:
            self.epoch, self.batches = epoch, self._drawn(epoch)
        return self.batches[place]

    def _drawn(self, epoch: int) -> list[list[int]]:
        """The batches of an epoch, as many as in every other one."""
        generator = np.random.default_rng((self.seed, epoch))
        order = generator.permutation(len(self.sizes)).tolist()
        made: list[list[int]] = []
        for sort in (False, True):
            own = [item for item in order if self.sorts[item] == sort]
            for start in range(0, len(own), 8 * self.batch):
                near = sorted(own[start : start + 8 * self.batch], key=lambda one: self.sizes[one])
                made += [near[at : at + self.batch] for at in range(0, len(near), self.batch)]
        return [made[at] for at in generator.permutation(len(made)).tolist()]


def _copied(head: Any) -> dict[str, Tensor]:
    named = head.named_parameters()
    return {name: one.detach().clone() for name, one in named if one.requires_grad}


def _mixed(seed: int, step: int, lesson: int) -> int:
    return int(np.random.SeedSequence((seed, step, lesson)).generate_state(1)[0])


def _devices(reader: Reader) -> list[torch.device]:
    return [reader.device] if reader.device.type == "cuda" else []
