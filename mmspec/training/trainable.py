"""What a recipe lets one train: where its head begins, what it is taught, and how fast.

    RECIPE = with_head(tree, verifier, training=EAGLE)           # a recipe says so,
    learn(EAGLE, reader, head, lessons, steps)                   # and this teaches a head

`mmspec train` needs no more than this declaration, or another `DrafterTraining`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from mmspec.models.fingerprint import check_signed, sign
from mmspec.recipe import DraftModelKind
from mmspec.targets.readers.reader import Reader
from mmspec.training.fitting import Course, Descent, Fall, divided, fit
from mmspec.training.reporting import Report, silent

if TYPE_CHECKING:  # its file needs this one
    from mmspec.training.heads import Lesson


class Beginning(Protocol):
    """Makes an untrained head for a target; `changes` are of its configuration.

    `counts` (V,) int64 say how often each token is said in what will be taught. Raises ValueError
    for changes that are none.
    """

    def __call__(self, target: Reader, counts: Tensor, **changes: Any) -> nn.Module: ...


class DrafterTraining(Protocol):
    """What `mmspec train` asks of a recipe; whatever drafts is called a head here.

    A head is a module with a `config` and `save_pretrained`.
    """

    @property
    def begin(self) -> Beginning: ...
    @property
    def loss(self) -> Callable[[Reader, Any, Lesson], Tensor]: ...  # (target, head, lesson) -> ()
    @property
    def check(self) -> Callable[[Any, Reader], None]: ...  # raises ValueError for another target's
    @property
    def rate(self) -> float: ...
    @property
    def reads_states(self) -> bool: ...  # whether the loss reads the target's hidden states
    def opened(
        self, folder: Path, kinds: Sequence[DraftModelKind], target: Reader, **changes: Any
    ) -> nn.Module:
        """What lies in a folder, to begin with. Raises ValueError for what cannot be taught."""
        ...

    def stages(
        self, head: Any, steps: int, rate: float, muon: bool = False
    ) -> list[Descent]: ...  # one after another; raises ValueError for a muon it has not
    def parts(self, head: Any) -> Mapping[str, Any]: ...  # what `accelerate` is given of it


@dataclass(frozen=True)
class HeadTraining:
    """A head's training: its loss over a lesson, and AdamW's settings.

    `loss` reads the lesson by the target, which is frozen, and returns a scalar that depends on
    the head; noise is drawn from torch's own generator. `check` raises ValueError for a head of
    another target. `warm` is a share of the steps; None = a tenth, at most 100.
    """

    begin: Beginning
    loss: Callable[..., Tensor]  # (target, head, lesson, its settings by name) -> ()
    check: Callable[[Any, Reader], None]
    rate: float = 1e-4
    warm: float | None = 0.03
    floor: float = 0.02
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 0.5
    reads_states: ClassVar[bool] = True

    def settings(self, steps: int) -> dict[str, Any]:
        """Those of a `Descent` of so many steps."""
        warm = None if self.warm is None else max(1, int(self.warm * steps + 1e-9))
        return {"floor": self.floor, "warm": warm, "betas": self.betas, "clip": self.clip}

    def stages(self, head: nn.Module, steps: int, rate: float, muon: bool = False) -> list[Descent]:
        """One course takes the steps: AdamW, but Muon for weight matrices where it is asked for."""
        matrices, others = divided(head, learnt(head)) if muon else ([], learnt(head))
        return [Descent(others, Fall(steps, rate), matrices, **self.settings(steps))]

    def opened(
        self, folder: Path, kinds: Sequence[DraftModelKind], target: Reader, **changes: Any
    ) -> nn.Module:
        """The head in a folder. Raises ValueError for what is none, or is another target's."""
        if changes:
            raise ValueError(f"--set {next(iter(changes))} is of a new head; drop it, or --head")
        kind = next((one for one in kinds if folder.is_dir() and one.owns(folder)), None)
        if kind is None:
            words = " or ".join(one.words for one in kinds)
            raise ValueError(f"{folder} holds no {words}; give --head the folder of one")
        found: nn.Module = kind.load(folder, target, torch.float32)
        check_signed(found, target)
        self.check(found, target)
        return found

    def parts(self, head: nn.Module) -> Mapping[str, Any]:
        """The head is the draft model."""
        return {"drafter": head}


def learn(
    training: HeadTraining,
    reader: Reader,
    head: Any,
    lessons: Iterator[Lesson],
    steps: int,
    rate: float | None = None,
    progress: Report = silent,
    **settings: Any,
) -> None:
    """Train `head` beside a frozen target, and note in its configuration which target that is.

    The rate is the training's own if not said; `settings` are of its loss. Raises ValueError for a
    head of another target.
    """
    training.check(head, reader)
    head.train()
    fit(
        learnt(head),
        lessons,
        lambda lesson: training.loss(reader, head, lesson, **settings),
        *(Fall(steps, training.rate if rate is None else rate), "head", Course(progress=progress)),
        **training.settings(steps),
    )
    head.train(False)
    sign(head, reader)


def learnt(head: nn.Module) -> list[nn.Parameter]:
    """What of a head is not frozen."""
    return [one for one in head.parameters() if one.requires_grad]
