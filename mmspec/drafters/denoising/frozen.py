"""Drafting with an old prediction of the target: no draft model, no training.

De Bortoli, Galashov, Gretton and Doucet 2025 ("Accelerated diffusion models via speculative
sampling"); with a frozen clean sample, autospeculative decoding (Hu et al. 2025).

    step        4    5    6    7    8
    state      x4   x5  [x6   x7   x8]     x6, x7, x8 drafted from x5 with the prediction at x4
                ^ predicted last round      or, refreshed, with the prediction at x5
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
from mmspec.errors import choose_option
from mmspec.recipe import Kit, Recipe
from mmspec.targets.continuous.denoising import Trajectory


class Root(Protocol):
    """Selects the rows that are evaluated at their current state before drafting."""

    def rows_to_refresh(self, context: Trajectory, progress: Progress) -> list[bool]: ...


@dataclass(frozen=True)
class Refresh:
    """Rows whose last draft was rejected, and all at the start: two calls in such a round.

    After full acceptance this gains nothing: the state after the draft was made with the newest
    prediction.
    """

    def rows_to_refresh(self, context: Trajectory, progress: Progress) -> list[bool]:
        at = zip(progress.is_fully_accepted, context.known.ever, strict=True)
        return [not (whole and ever) for whole, ever in at]


@dataclass(frozen=True)
class Prefetch:
    """No rows: use the last verified parent's prediction. One call per round, an older draft."""

    def rows_to_refresh(self, context: Trajectory, progress: Progress) -> list[bool]:
        return [False] * context.batch


ROOTS: dict[str, Root] = {"refresh": Refresh(), "prefetch": Prefetch()}


@dataclass(frozen=True)
class PredictionDrafter(WindowDrafter):
    """Drafts with predictions that the target made; `freeze` selects the quantity that is kept."""

    freeze: Freeze = field(default_factory=Clean)
    root: Root = field(default_factory=Refresh)
    sees: ClassVar[str] = "target-memory"

    def levels(self, context: Trajectory, progress: Progress) -> Sequence[int]:
        """How deep each row is drafted.

        Evaluates the target where `root` requires it; rows without any prediction are not drafted.
        """
        levels = self.window.levels(progress, context)
        rows_to_refresh = self.root.rows_to_refresh(context, progress)
        context.look(
            context, [row for row, level in enumerate(levels) if level and rows_to_refresh[row]]
        )
        rows = zip(levels, context.known.ever, strict=True)
        progress.levels = [level if ever else 0 for level, ever in rows]
        return progress.levels


@dataclass(frozen=True)
class Frozen(PredictionDrafter):
    """Draft every state ahead with the newest prediction at a committed one.

    Exact with any exact verifier. A row without a prediction that is not refreshed drafts nothing.
    """

    def propose(self, context: Trajectory, state: Progress) -> Draft:
        levels = self.levels(context, state)
        tree = self.window.topology(max(levels))
        known, kernel = context.known, context.kernel
        at = torch.tensor(known.step, device=context.device)
        memory = self.freeze.freeze(kernel, known.state, known.prediction.clean, at)[:, None]

        def distribution(depth: int, x: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
            mean = self.freeze.mean(kernel, memory, x, step)
            return next_distribution(context, depth, x, step, mean)

        return unroll(context, tree, levels, distribution, self.kind)


def next_distribution(
    context: Trajectory, depth: int, x: Tensor, step: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor]:  # (B, W, *E), std broadcasting
    """The distribution of a state drafted with `mean`, or the target's own where it is known.

    A network that predicts its own std is assumed to keep its ratio to the kernel's.
    """
    known, std = context.known, context.kernel.std_at(step, x)
    own = None
    if known.prediction.std is not None:
        own = known.prediction.std[:, None]
        at = torch.tensor(known.step, device=x.device)[:, None]
        table = context.kernel.std_at(at, own)
        ratio = torch.where(table > 0, own / table.clamp_min(1e-30), torch.ones_like(own))
        std = ratio * std
    if depth or not any(known.fresh):
        return mean, std
    fresh = torch.tensor(known.fresh, device=x.device).reshape(-1, *(1,) * (x.dim() - 1))
    clean = context.kernel.mean(x, known.prediction.clean[:, None], step)
    deviation = std if own is None else torch.where(fresh, own, std)
    return torch.where(fresh, clean, mean), deviation


MISMATCH_WINDOW = Window(pace=Mismatch())


def with_old_predictions(
    architecture: Callable[[Kit], Drafter],
    verifier: Verifier,
    execution: Window = MISMATCH_WINDOW,
    options: Mapping[str, Any] = {"freeze": "clean", "root": "prefetch"},
    **parts: Any,
) -> Recipe:
    """A recipe that drafts from the target's earlier predictions, as deep as those should hold.

    `parts` are further fields of the recipe.
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
    """The options `freeze`, if the recipe has it (default: the clean sample), and `root`."""
    freeze = choose_option("freeze", kit.options.get("freeze", "clean"), FREEZES)
    return freeze, choose_option("root", kit.options["root"], ROOTS)


def frozen_prediction(kit: Kit) -> Drafter:
    """The target's last prediction."""
    return Frozen(window_of(kit), *prediction_options(kit))


def frozen_clean_sample(kit: Kit) -> Drafter:
    """The target's last clean sample: exchangeable increments."""
    return Frozen(window_of(kit), *prediction_options(kit))


def frozen_with_one_deviation(kit: Kit) -> Drafter:
    """The target's last prediction, for verifiers that couple along the line of two means.

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
