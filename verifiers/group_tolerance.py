"""Accept action tokens by whole groups: position, rotation, gripper (HeiSD)."""

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
from mmspec.verifiers.walk import find_deepest_path

Aggregate = Callable[[Tensor], Tensor]  # biases -> summands of a group
AGGREGATES: dict[str, Aggregate] = {"abs_sum": torch.abs, "signed_sum": lambda bias: bias}


@dataclass(frozen=True)
class GroupTolerance(ActionWalk):
    """Accept whole groups whose tokens lie close to the target's (HeiSD, Zheng et al. 2026).

    With the bias b_j = c_j - t_j of a drafted token c_j and the target's token t_j, given the
    drafted tokens before, a group is accepted if

        max |b_j| <= bias   and   sum |b_j| <= total,

    as a whole or not at all; "signed_sum" uses |sum b_j|, probably what the paper means. If a draft
    begins or ends within a group, its part counts as the group. Both tokens must be actions, and
    strict components must be equal. The longest path of whole groups is accepted, of several the
    closest; then follows the target's token.

    Lossy; bias=0 or total=0 ("abs_sum") accepts only the target's tokens and equals plain decoding.
    The verdict's excess counts accepted tokens that differ from the target's. Raises ValueError for
    negative tolerances and another aggregate.
    """

    space: ActionSpace
    bias: float = 15
    total: float = 30
    aggregate: str = "abs_sum"
    state: tuple[int, ...] | None = field(
        default=None, repr=False, compare=False
    )  # tokens generated

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
    def description(self) -> str:
        return f"longest path of groups within {self.bias:g} bins each, {self.total:g} together"

    def bind_context(self, context: Any) -> Verifier:
        return replace(
            self, state=tuple(context.num_generated(row) for row in range(context.batch))
        )

    def select_path(
        self, draft: Draft, target: Tensor, off: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        off = torch.where(self._strict(draft) & (off > 0), torch.inf, off)
        whole = self._whole(draft, (draft.tokens - target).double(), off)
        return find_deepest_path(draft, whole, -off.clamp_max(self.space.codes.bins))

    def _strict(self, draft: Draft) -> Tensor:  # (B, N) bool
        assert self.state is not None
        dims = self.space.dims_at(self.state, draft.relative_positions())
        return self.space.is_strict.to(dims.device)[dims]

    def _whole(self, draft: Draft, bias: Tensor, off: Tensor) -> Tensor:  # (B, N) x2 -> (B, N) bool
        """The nodes a path may end at: ends of groups or of the draft, with all groups passing."""
        assert self.state is not None
        above = draft.ancestors()  # (B, N, N)
        run = self._runs(draft)
        same = above & (run[:, :, None] == run[:, None])
        widest = torch.where(same, off[:, None], 0).amax(-1)
        summed = (same * AGGREGATES[self.aggregate](bias)[:, None]).sum(-1).abs()
        passes = (widest <= self.bias) & (summed <= self.total)
        nodes = torch.arange(draft.nodes, device=run.device)
        children = (draft.parents[:, None] == nodes[:, None]) & draft.mask[:, None]  # (B, N, N)
        continues = (children & (run[:, None] == run[..., None])).any(-1)
        whole = draft.mask & ~continues
        return whole & ~(above & (whole & ~passes)[:, None]).any(-1)

    def _runs(self, draft: Draft) -> Tensor:  # (B, N)
        """The group of a token, numbered separately per action."""
        assert self.state is not None
        places = (
            torch.tensor(self.state, device=draft.tokens.device)[:, None]
            + draft.relative_positions()
        )
        number = list(self.space.groups)
        groups = torch.tensor([number.index(dim.group) for dim in self.space.dims])
        dims = self.space.dims_at(self.state, draft.relative_positions())
        return places // self.space.size * len(number) + groups.to(dims.device)[dims]
