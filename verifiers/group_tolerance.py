"""Action tokens are kept by whole groups: a position, a rotation, a gripper (HeiSD)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.codes.actions import ActionSpace
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.errors import check_number
from mmspec.laws.noise import Noise
from mmspec.verifiers.action_tolerance import KINDS, bins_off
from mmspec.verifiers.coupled import target_tokens
from mmspec.verifiers.walk import check, deepest

Aggregate = Callable[[Tensor], Tensor]  # biases -> what is summed over a group
AGGREGATES: dict[str, Aggregate] = {"abs_sum": torch.abs, "signed_sum": lambda bias: bias}


@dataclass(frozen=True)
class GroupTolerance(Verifier):
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
    said: tuple[int, ...] | None = field(default=None, repr=False, compare=False)
    kinds: ClassVar[tuple[Kind, ...]] = KINDS

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
    def couples(self) -> bool:
        return self.lossless

    @property
    def words(self) -> str:
        return f"longest path of groups within {self.bias:g} bins each, {self.total:g} together"

    def within(self, context: Any) -> Verifier:
        return replace(self, said=tuple(context.generated(row) for row in range(context.batch)))

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check(self, draft, law=False)
        if self.said is None:
            raise ValueError("a tolerance goes by the component of a token; call within() first")
        own = target_tokens(draft, scores, noise)
        if not draft.nodes:
            none = draft.tokens.sum(-1)
            return Verdict(draft.tokens, none, own[:, 0])
        wanted = own.gather(1, draft.parents + 1)
        off = bins_off(self.space.codes, draft.tokens, wanted)
        off = torch.where(self._strict(draft) & (off > 0), torch.inf, off)
        near = self._near(draft, (draft.tokens - wanted).double(), off)
        far = -off.clamp_max(self.space.codes.bins)
        path, length, row = deepest(draft, near, far)
        kept = path >= 0
        misses = (kept & (draft.tokens != wanted).gather(1, path.clamp_min(0))).sum(-1)
        over = None if self.lossless else misses.double()
        return Verdict(path, length, own.gather(1, row[:, None])[:, 0], over)

    def _strict(self, draft: Draft) -> Tensor:  # (B, N) bool
        assert self.said is not None
        dims = self.space.dims_at(self.said, draft.places())
        return self.space.is_strict.to(dims.device)[dims]

    def _near(self, draft: Draft, bias: Tensor, off: Tensor) -> Tensor:  # (B, N) x2 -> (B, N) bool
        """Which nodes a path may end at: ends of groups or of the draft, all groups passing."""
        assert self.said is not None
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
        assert self.said is not None
        places = torch.tensor(self.said, device=draft.tokens.device)[:, None] + draft.places()
        number = list(self.space.groups)
        groups = torch.tensor([number.index(dim.group) for dim in self.space.dims])
        dims = self.space.dims_at(self.said, draft.places())
        return places // self.space.size * len(number) + groups.to(dims.device)[dims]
