"""Drafting with an old prediction of the target: no draft model, no training.

De Bortoli, Galashov, Gretton and Doucet 2025 ("Accelerated diffusion models via speculative
sampling"); with a frozen clean sample, autospeculative decoding (Hu et al. 2025).

    step        4    5    6    7    8
    state      x4   x5  [x6   x7   x8]     x6, x7, x8 drafted from x5 with what was seen in x4
                ^ seen in the last round    or, refreshed, with what is seen in x5 itself
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.drafters.denoising.freeze import Clean, Freeze, freeze_named
from mmspec.drafters.denoising.unroll import kinds, unroll
from mmspec.drafters.denoising.window import Progress, Window, window_of
from mmspec.recipe import Kit
from mmspec.targets.denoising import Trajectory


class Root(Protocol):
    """Which rows are evaluated at their current state before they are drafted from there."""

    def wanted(self, context: Trajectory, progress: Progress) -> list[bool]: ...


@dataclass(frozen=True)
class Refresh:
    """Rows whose last draft was rejected, and all at the start: two calls for such a round.

    After a whole acceptance nothing is gained: the state behind the draft was made with the newest
    prediction there is.
    """

    def wanted(self, context: Trajectory, progress: Progress) -> list[bool]:
        seen = zip(progress.whole, context.known.ever, strict=True)
        return [not (whole and ever) for whole, ever in seen]


@dataclass(frozen=True)
class Prefetch:
    """None: what was seen in the last verified parent serves. One call a round, a staler draft."""

    def wanted(self, context: Trajectory, progress: Progress) -> list[bool]:
        return [False] * context.batch


ROOTS: dict[str, Root] = {"refresh": Refresh(), "prefetch": Prefetch()}


def root_named(choice: Any) -> Root:
    """A `Root` by its name, or the object itself. Raises ValueError listing the names."""
    if isinstance(choice, str) and choice in ROOTS:
        return ROOTS[choice]
    if isinstance(choice, Refresh | Prefetch):
        return choice
    raise ValueError(f"root={choice!r} is not known; choose one of {', '.join(ROOTS)}")


@dataclass(frozen=True)
class Frozen(Drafter):
    """Draft every state ahead with the newest prediction at a committed one.

    Exact with any verifier that is. A row of which nothing was seen yet, and is not refreshed,
    drafts nothing.
    """

    window: Window = field(default_factory=Window)
    freeze: Freeze = field(default_factory=Clean)
    root: Root = field(default_factory=Refresh)
    kind: Kind = Kind.RACE
    sees: ClassVar[str] = "target-memory"

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return kinds(self.window)

    @property
    def trees(self) -> bool:
        return bool(self.window.branching)

    def drawing(self, kind: Kind) -> Drafter:
        return replace(self, kind=kind)

    def begin(self, context: Trajectory) -> Progress:
        return self.window.begin(context)

    def propose(self, context: Trajectory, state: Progress) -> Draft:
        levels = seen_levels(context, state, self.window, self.root)
        tree = self.window.topology(max(levels))
        if not tree.nodes:
            return context.nothing()
        known, kernel = context.known, context.kernel
        at = torch.tensor(known.step, device=context.device)
        memory = self.freeze.freeze(kernel, known.state, known.prediction.clean, at)[:, None]

        def law(depth: int, x: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
            mean = self.freeze.mean(kernel, memory, x, step)
            return opening(context, depth, x, step, mean)

        return unroll(context, tree, levels, law, self.kind)

    def observe(
        self, context: Trajectory, state: Progress, draft: Draft, scores: Scores, kept: Round
    ) -> Progress:
        return self.window.observe(state, context, draft, scores, kept)


def seen_levels(
    context: Trajectory, progress: Progress, window: Window, root: Root
) -> Sequence[int]:
    """How deep each row is drafted; looks where `root` wants it, leaves out what was never seen."""
    levels = window.levels(progress, context)
    wanted = root.wanted(context, progress)
    looked = [row for row, deep in enumerate(levels) if deep and wanted[row]]
    context.look(context, looked)
    rows = zip(levels, context.known.ever, strict=True)
    progress.levels = [deep if ever else 0 for deep, ever in rows]
    return progress.levels


def opening(
    context: Trajectory, depth: int, x: Tensor, step: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor]:  # (B, W, *E), std broadcasting
    """The law of a state drafted with `mean`; the target's own where that is known already.

    A network that predicts its own std is taken to keep the ratio of that to the kernel's.
    """
    known, std = context.known, context.kernel.deviation(step, x)
    own = None
    if known.prediction.std is not None:
        own = known.prediction.std[:, None]
        seen = torch.tensor(known.step, device=x.device)[:, None]
        table = context.kernel.deviation(seen, own)
        ratio = torch.where(table > 0, own / table.clamp_min(1e-30), torch.ones_like(own))
        std = ratio * std
    if depth or not any(known.fresh):
        return mean, std
    fresh = torch.tensor(known.fresh, device=x.device).reshape(-1, *(1,) * (x.dim() - 1))
    clean = context.kernel.mean(x, known.prediction.clean[:, None], step)
    sure = std if own is None else torch.where(fresh, own, std)
    return torch.where(fresh, clean, mean), sure


def frozen_prediction(kit: Kit) -> Drafter:
    """What the target predicted last."""
    freeze, root = freeze_named(kit.options["freeze"]), root_named(kit.options["root"])
    return Frozen(window_of(kit), freeze, root)


def frozen_clean_sample(kit: Kit) -> Drafter:
    """The clean sample that the target predicted last: exchangeable increments."""
    return Frozen(window_of(kit), Clean(), root_named(kit.options["root"]))


def frozen_with_one_deviation(kit: Kit) -> Drafter:
    """What the target predicted last, for verifiers that couple along the line of two means.

    The clean sample, unless the recipe has an option `freeze`. Raises ValueError where the network
    predicts the standard deviations of its steps.
    """
    if kit.target.denoiser.kernel.is_predicted:
        raise ValueError(
            "this recipe couples steps whose standard deviation is the sampler's, but here the "
            'network predicts it (variance_type "learned" or "learned_range"); use the recipe '
            "accelerated-diffusion-carried or asd, or pipe.scheduler = "
            'DDPMScheduler.from_config(pipe.scheduler.config, variance_type="fixed_small")'
        )
    return frozen_prediction(kit) if "freeze" in kit.options else frozen_clean_sample(kit)
