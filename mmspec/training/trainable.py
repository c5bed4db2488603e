"""The training of a recipe's draft model: initial head, loss and optimiser settings.

    RECIPE = with_head(tree, verifier, training=EAGLE)           # declared by a recipe
    train_head(EAGLE, reader, head, examples, steps)             # trains a head

`mmspec train` uses this declaration, or another `DrafterTraining`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from mmspec._renamed import rename_attributes
from mmspec.models.compatibility import check_signature, sign_head
from mmspec.recipe import DraftModelKind
from mmspec.targets.readers.reader import Reader
from mmspec.training.fitting import (
    CosineDecay,
    ScheduledOptimizer,
    TrainingProgress,
    TrainingRun,
    fit,
    silent,
    split_parameters,
)

if TYPE_CHECKING:  # circular import
    from mmspec.training.heads import TrainingExample


class HeadFactory(Protocol):
    """Makes an untrained head for a target; `changes` are of its configuration.

    `counts` (V,) int64 are the token counts of the training data. Raises ValueError for invalid
    changes.
    """

    def __call__(self, target: Reader, counts: Tensor, **changes: Any) -> nn.Module: ...


class DrafterTraining(Protocol):
    """What `mmspec train` needs of a recipe; all draft models are called heads here.

    A head is a module with a `config` and `save_pretrained`.
    """

    @property
    def begin(self) -> HeadFactory: ...
    @property
    def loss(
        self,
    ) -> Callable[[Reader, Any, TrainingExample], Tensor]: ...  # (target, head, example) -> ()
    @property
    def check(
        self,
    ) -> Callable[[Any, Reader], None]: ...  # raises ValueError for a head of another target
    @property
    def rate(self) -> float: ...
    @property
    def reads_states(self) -> bool: ...  # whether the loss reads the target's hidden states
    @property
    def is_packable(self) -> bool: ...  # whether the loss takes several rows in one sequence
    def load(
        self, folder: Path, kinds: Sequence[DraftModelKind], target: Reader, **changes: Any
    ) -> nn.Module:
        """Load an initial head from a folder. Raises ValueError for what cannot be trained."""
        ...

    def stages(
        self, head: Any, steps: int, rate: float, muon: bool = False
    ) -> list[ScheduledOptimizer]: ...  # in order; raises ValueError if muon is unsupported
    def parts(self, head: Any) -> Mapping[str, Any]: ...  # arguments of `accelerate`


@dataclass(frozen=True)
class HeadTraining:
    """The training of a head: its loss over an example, and AdamW's settings.

    `loss` runs the frozen target on the example, and returns a scalar that depends on the head;
    noise is drawn from torch's global generator. `check` raises ValueError for a head of another
    target. `warm` is the warm-up as a share of the steps; None = a tenth, at most 100 steps.
    `is_packable`: whether the loss takes examples with `pack`.
    """

    begin: HeadFactory
    loss: Callable[..., Tensor]  # (target, head, example, **settings) -> ()
    check: Callable[[Any, Reader], None]
    rate: float = 1e-4
    warm: float | None = 0.03
    floor: float = 0.02
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 0.5
    is_packable: bool = False
    reads_states: ClassVar[bool] = True

    def settings(self, steps: int) -> dict[str, Any]:
        """Settings of a `ScheduledOptimizer` for a number of steps."""
        warm = None if self.warm is None else max(1, int(self.warm * steps + 1e-9))
        return {"floor": self.floor, "warmup_steps": warm, "betas": self.betas, "clip": self.clip}

    def stages(
        self, head: nn.Module, steps: int, rate: float, muon: bool = False
    ) -> list[ScheduledOptimizer]:
        """Return a single stage: AdamW, with Muon for weight matrices if `muon`."""
        matrices, others = (
            split_parameters(head, trainable_parameters(head))
            if muon
            else ([], trainable_parameters(head))
        )
        return [
            ScheduledOptimizer(others, CosineDecay(steps, rate), matrices, **self.settings(steps))
        ]

    def load(
        self, folder: Path, kinds: Sequence[DraftModelKind], target: Reader, **changes: Any
    ) -> nn.Module:
        """Load the head in a folder, without weights for a target on the meta device.

        Raises ValueError for other models and other targets.
        """
        if changes:
            raise ValueError(
                f"--set {next(iter(changes))} applies to new heads only; drop it, or --head"
            )
        kind = next((one for one in kinds if folder.is_dir() and one.owns(folder)), None)
        if kind is None:
            words = " or ".join(one.description for one in kinds)
            raise ValueError(f"{folder} holds no {words}; give --head the folder of one")
        found: nn.Module = (
            kind.skeleton(folder, target)
            if target.device.type == "meta"  # a dry run needs no weights
            else kind.load(folder, target, torch.float32)
        )
        check_signature(found, target)
        self.check(found, target)
        return found

    def parts(self, head: nn.Module) -> Mapping[str, Any]:
        """Return the head as the draft model."""
        return {"drafter": head}


def train_head(
    training: HeadTraining,
    reader: Reader,
    head: Any,
    examples: Iterator[TrainingExample],
    steps: int,
    rate: float | None = None,
    progress: TrainingProgress = silent,
    **settings: Any,
) -> None:
    """Train `head` for a frozen target, and store the target's fingerprint in its configuration.

    Default rate: the training's. `settings` are those of its loss. Raises ValueError for a head of
    another target.
    """
    training.check(head, reader)
    head.train()
    fit(
        trainable_parameters(head),
        examples,
        lambda example: training.loss(reader, head, example, **settings),
        *(
            CosineDecay(steps, training.rate if rate is None else rate),
            "head",
            TrainingRun(progress=progress),
        ),
        **training.settings(steps),
    )
    head.train(False)
    sign_head(head, reader)


def trainable_parameters(head: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are not frozen."""
    return [one for one in head.parameters() if one.requires_grad]


__getattr__ = rename_attributes(__name__, {"learn": "train_head"})
