"""Drafting with another denoiser: a small network, or the target itself made cheap and inexact."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.drafters.denoising.unroll import kinds, unroll
from mmspec.drafters.denoising.window import Progress, Window, window_of
from mmspec.laws.kernels import GaussianKernel
from mmspec.recipe import Kit
from mmspec.targets.denoising import Denoiser, Trajectory


@dataclass(frozen=True)
class Independent:
    """One call of another denoiser per drafted state (De Bortoli et al. 2025, independent draft).

    It may be a smaller network, or a cached or forecast version of the target: what it gets wrong
    costs acceptance, never exactness. It has to stand on the target's grid, see `check_grids`.
    """

    denoiser: Denoiser
    window: Window = field(default_factory=Window)
    kind: Kind = Kind.RACE
    sees: ClassVar[str] = "nothing"

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return kinds(self.window)

    @property
    def trees(self) -> bool:
        return bool(self.window.branching)

    def begin(self, context: Trajectory) -> Progress:
        check_grids(self.denoiser.kernel, context.kernel)
        return self.window.begin(context)

    def propose(self, context: Trajectory, state: Progress) -> Draft:
        levels = self.window.levels(state, context)

        def law(depth: int, x: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
            rows = [row for row, most in enumerate(levels) if most > depth]
            return self._law(context, x, step, torch.tensor(rows, device=x.device))

        return unroll(context, self.window.topology(max(levels)), levels, law, self.kind)

    def observe(
        self, context: Trajectory, state: Progress, draft: Draft, scores: Scores, kept: Round
    ) -> Progress:
        return self.window.observe(state, context, draft, scores, kept)

    def _law(
        self, context: Trajectory, x: Tensor, step: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor]:  # (B, W, *E), (B, W), (R,)
        """Laws of the next states; rows that are not drafted any more keep x."""
        width = x.shape[1]
        states, at = x[rows].flatten(0, 1), step[rows].flatten()
        seen = self.denoiser.predict(states, at, rows.repeat_interleave(width))
        mean = context.kernel.mean(states, seen.clean, at).unflatten(0, (len(rows), width))
        deviation = context.kernel.deviation(step, x)
        if seen.std is not None:
            own = seen.std.unflatten(0, (len(rows), width))
            deviation = torch.ones_like(x).index_copy(0, rows, own)
        return x.index_copy(0, rows, mean), deviation


def check_grids(draft: GaussianKernel, target: GaussianKernel) -> None:
    """Raises ValueError where the draft's sampler does not take the target's steps."""
    if draft.steps != target.steps:
        raise ValueError(
            f"the draft's sampler takes {draft.steps} steps and the target's {target.steps}; give "
            "both the same scheduler and number of steps"
        )
    for name in ("alpha", "sigma"):
        mine, other = (getattr(kernel, name).cpu() for kernel in (draft, target))
        if not torch.allclose(mine, other, rtol=1e-4, atol=1e-6):
            raise ValueError(
                f"the draft's sampler and the target's differ in {name} on the way; give both the "
                "same scheduler, with the same settings"
            )


def small_denoiser(kit: Kit) -> Drafter:
    """An independent denoiser on the target's grid, one call per drafted state."""
    assert kit.drafter is not None
    check_grids(kit.drafter.denoiser.kernel, kit.target.denoiser.kernel)
    return Independent(kit.drafter.denoiser, window_of(kit))
