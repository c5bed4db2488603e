"""Drafting with an old prediction of the target: no draft model, no training.

De Bortoli, Galashov, Gretton and Doucet 2025 ("Accelerated diffusion models via speculative
sampling"); with a frozen clean sample, autospeculative decoding (Hu et al. 2025).

    step        4    5    6    7    8
    state      x4   x5  [x6   x7   x8]     x6, x7, x8 drafted from x5 with what was seen in x4
                ^ seen in the last round    or, refreshed, with what is seen in x5 itself
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from mmspec.draft import Draft, Drafter, Verifier
from mmspec.drafters.denoising.freeze import FREEZES, Clean, Freeze
from mmspec.drafters.denoising.unroll import WindowDrafter, unroll
from mmspec.drafters.denoising.window import Mismatch, Progress, Window, window_of
from mmspec.errors import chosen
from mmspec.recipe import Kit, Recipe
from mmspec.targets.continuous.denoising import Trajectory


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


@dataclass(frozen=True)
class PredictionDrafter(WindowDrafter):
    """Drafts with predictions that the target made; `freeze` says what is kept of them."""

    freeze: Freeze = field(default_factory=Clean)
    root: Root = field(default_factory=Refresh)
    sees: ClassVar[str] = "target-memory"

    def levels(self, context: Trajectory, progress: Progress) -> Sequence[int]:
        """How deep each row is drafted.

        Looks where `root` wants it, leaves out what was never seen.
        """
        levels = self.window.levels(progress, context)
        wanted = self.root.wanted(context, progress)
        context.look(context, [row for row, deep in enumerate(levels) if deep and wanted[row]])
        rows = zip(levels, context.known.ever, strict=True)
        progress.levels = [deep if ever else 0 for deep, ever in rows]
        return progress.levels


@dataclass(frozen=True)
class Frozen(PredictionDrafter):
    """Draft every state ahead with the newest prediction at a committed one.

    Exact with any verifier that is. A row of which nothing was seen yet, and is not refreshed,
    drafts nothing.
    """

    def propose(self, context: Trajectory, state: Progress) -> Draft:
        levels = self.levels(context, state)
        tree = self.window.topology(max(levels))
        known, kernel = context.known, context.kernel
        at = torch.tensor(known.step, device=context.device)
        memory = self.freeze.freeze(kernel, known.state, known.prediction.clean, at)[:, None]

        def distribution(depth: int, x: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
            mean = self.freeze.mean(kernel, memory, x, step)
            return opening(context, depth, x, step, mean)

        return unroll(context, tree, levels, distribution, self.kind)


def opening(
    context: Trajectory, depth: int, x: Tensor, step: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor]:  # (B, W, *E), std broadcasting
    """The distribution of a state drafted with `mean`; the target's own where that is known already.

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


PACED = Window(pace=Mismatch())


def with_old_predictions(
    architecture: Callable[[Kit], Drafter],
    verifier: Verifier,
    execution: Window = PACED,
    options: Mapping[str, Any] = {"freeze": "clean", "root": "prefetch"},
    **parts: Any,
) -> Recipe:
    """A recipe whose drafts follow what the target predicted before, as far as that should hold.

    `parts` are further fields.
    """
    return Recipe(
        architecture=architecture,
        execution=execution,
        verifier=verifier,
        sees="target-memory",
        options=options,
        decodes="latents",
        **parts,
    )


def prediction_options(kit: Kit) -> tuple[Freeze, Root]:
    """Options `freeze`, where the recipe has it (else the clean sample), and `root`."""
    freeze = chosen("freeze", kit.options.get("freeze", "clean"), FREEZES)
    return freeze, chosen("root", kit.options["root"], ROOTS)


def frozen_prediction(kit: Kit) -> Drafter:
    """What the target predicted last."""
    return Frozen(window_of(kit), *prediction_options(kit))


def frozen_clean_sample(kit: Kit) -> Drafter:
    """The clean sample that the target predicted last: exchangeable increments."""
    return Frozen(window_of(kit), *prediction_options(kit))


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
    return frozen_prediction(kit)
