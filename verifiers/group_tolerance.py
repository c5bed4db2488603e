"""Action tokens are kept by whole groups: a position, a rotation, a gripper (HeiSD)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mmspec.codes.actions import ActionSpace
from mmspec.draft import Draft, Verifier
from mmspec.errors import check_number
from mmspec.verifiers.action_tolerance import ActionWalk
from mmspec.verifiers.walk import deepest

Aggregate = Callable[[Tensor], Tensor]  # biases -> what is summed over a group
AGGREGATES: dict[str, Aggregate] = {"abs_sum": torch.abs, "signed_sum": lambda bias: bias}


@dataclass(frozen=True)
class GroupTolerance(ActionWalk):
    """Keep whole groups whose tokens lie close to the target's (HeiSD, Zheng et al. 2026).

    With the bias b_j = c_j - t_j of a drafted token c_j where the target says t_j, given the
    drafted tokens before, a group is kept if

        max |b_j| <= bias   and   sum |b_j| <= total,

    all of it or nothing; "signed_sum" takes |sum b_j|, the likely meaning of the paper. Where a
    draft begins or ends within a group its part counts as the group. Both tokens must be actions,
    and strict components must be equal. The longest path of whole groups is kept, of several the
    closest; then follows the target's own token.

    Lossy; bias=0 or total=0 ("abs_sum") keeps the target's own tokens alone, and says what plain
    decoding says. The verdict's excess counts kept tokens that are not the target's. Raises
    ValueError for tolerances below 0 and another aggregate.
    """

    space: ActionSpace
    bias: float = 15
    total: float = 30
    aggregate: str = "abs_sum"
    now: tuple[int, ...] | None = field(default=None, repr=False, compare=False)  # tokens said

    def __post_init__(self) -> None:
        for name, value in (("bias", self.bias), ("total", self.total)):
            if value != float("inf"):
                check_number(name, value, 0, example=15)
        if self.aggregate not in AGGREGATES:
            raise ValueError(
                f"aggregate={self.aggregate!r} is not known; choose {' or '.join(AGGREGATES)}"
            )

    @property
    def lossless(self) -> bool:
        return self.bias < 1 or (self.aggregate == "abs_sum" and self.total < 1)

    @property
    def words(self) -> str:
        return f"longest path of groups within {self.bias:g} bins each, {self.total:g} together"

    def within(self, context: Any) -> Verifier:
        return replace(self, now=tuple(context.generated(row) for row in range(context.batch)))

    def near(self, draft: Draft, wanted: Tensor, off: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        off = torch.where(self._strict(draft) & (off > 0), torch.inf, off)
        whole = self._whole(draft, (draft.tokens - wanted).double(), off)
        return deepest(draft, whole, -off.clamp_max(self.space.codes.bins))

    def _strict(self, draft: Draft) -> Tensor:  # (B, N) bool
        assert self.now is not None
        dims = self.space.dims_at(self.now, draft.places())
        return self.space.is_strict.to(dims.device)[dims]

    def _whole(self, draft: Draft, bias: Tensor, off: Tensor) -> Tensor:  # (B, N) x2 -> (B, N) bool
        """Which nodes a path may end at: ends of groups or of the draft, all groups passing."""
        assert self.now is not None
        above = draft.ancestors() & draft.mask[:, None]  # (B, N, N)
        run = self._runs(draft)
        same = above & (run[:, :, None] == run[:, None])
        widest = torch.where(same, off[:, None], 0).amax(-1)
        summed = (same * AGGREGATES[self.aggregate](bias)[:, None]).sum(-1).abs()
        passes = (widest <= self.bias) & (summed <= self.total)
        nodes = torch.arange(draft.nodes, device=run.device)
        children = (draft.parents[:, None] == nodes[:, None]) & draft.mask[:, None]  # (B, N, N)
        goes_on = (children & (run[:, None] == run[..., None])).any(-1)
        whole = draft.mask & ~goes_on
        return whole & ~(above & (whole & ~passes)[:, None]).any(-1)

    def _runs(self, draft: Draft) -> Tensor:  # (B, N)
        """The group of a token, those of later actions apart."""
        assert self.now is not None
        places = torch.tensor(self.now, device=draft.tokens.device)[:, None] + draft.places()
        number = list(self.space.groups)
        groups = torch.tensor([number.index(dim.group) for dim in self.space.dims])
        dims = self.space.dims_at(self.now, draft.places())
        return places // self.space.size * len(number) + groups.to(dims.device)[dims]
