"""Jacobi drafting: what the target said behind a rejected token is the next draft.

A window of four drafted tokens over one round; a dot is a slot that nobody has spoken about.

    drafted   x0 x1 x2 x3 .      one forward gives a distribution for every slot and one behind the
    last verdict   x0 y               x1 rejected, y committed in its place carried         x2 x3 x4
    redrawn from the new distributions by the suffix policy, x4 newly drawn next            x2 x3 x4
    x5  x5 is a guess of the initialiser
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.codes.grid import Grid
from mmspec.declared import answered_by
from mmspec.distributions.categorical import Categorical
from mmspec.draft import Draft, Drafter, Kind, Round, Scores, Verifier, categorical
from mmspec.drafters.growth import Chain
from mmspec.drafters.jacobi.initial import Frame, Initialiser, Map, Structural, initialiser
from mmspec.drafters.jacobi.suffix import (
    REUSE,
    CoupleGumbel,
    CoupleMax,
    Resample,
    Slots,
    Suffix,
    one_hot,
)
from mmspec.drafters.jacobi.tree import Proactive
from mmspec.drafters.lengths.goodput import parse
from mmspec.drafters.lengths.length import Fixed, Length
from mmspec.recipe import Deferred, Kit, Recipe
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True)
class Jacobi(Drafter):
    """The target drafts for itself, out of the distributions of its last pass (SJD, Teng et al. 2025).

    `length` counts drafted tokens: a window of L in the papers, its committed token included, is
    length L - 1; 0 is plain decoding. `suffix` redraws what stands behind a rejected token,
    `initial` guesses new slots. Without a `grid` the one that the target offers in
    `context.shared["grid"]` counts, and without that there is none. Rows accept at their own pace.

    Verify with a rule that decides position by position (`Recursive`, `Coupled`): one that looks
    ahead has looked at the tokens that a coupling policy carries on. A draft records the
    distributions that its `suffix` does.
    """

    length: int | str | Length = 15
    suffix: Suffix = field(default_factory=Resample)
    initial: Initialiser = field(default_factory=Structural)
    grid: Grid | None = None
    proactive: Proactive | None = None
    sees: ClassVar[str] = "target-memory"

    def __post_init__(self) -> None:
        assert self.policy.most >= 0  # reads the length

    @cached_property
    def policy(self) -> Length:
        return parse(self.length)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return (Kind.WOR,) if self.trees else (Kind.IID,)

    @property
    def trees(self) -> bool:
        return self.proactive is not None and self.proactive.width > 1

    records_distribution = answered_by("suffix.records_distribution")
    carries = answered_by("suffix.carries")

    def begin(self, context: Context) -> JacobiWindow:
        assert context.scores is not None, (
            "a request begins with the distribution of its first token"
        )
        grid = context.shared.get("grid") if self.grid is None else self.grid
        first = torch.zeros(context.batch, dtype=torch.int64, device=context.device)
        return JacobiWindow(
            tokens=first[:, None][:, :0],
            distribution=categorical(context.scores.distribution),
            known=first,
            length=self.policy.begin(),
            map=None if grid is None else Map.of(grid, context.device),
        )

    def propose(self, context: Context, state: JacobiWindow) -> Draft:
        width = self.policy.budget(state.length, context)
        tokens, distribution = state.tokens[:, :width], state.distribution[:, 1 : 1 + width]
        if width:
            tokens, distribution = self._filled(context, state, width)
        state.proposed, state.drafted = tokens, distribution
        if not width:
            return Draft.empty(context.batch, context.device)
        if not self.trees:
            return Draft.chain(tokens, Kind.IID, distribution)
        assert self.proactive is not None
        return self.proactive.spread(tokens, distribution, context.noise)

    def observe(
        self, context: Context, state: JacobiWindow, draft: Draft, scores: Scores, kept: Round
    ) -> JacobiWindow:
        """Move the window behind what was committed and redraw what is left of it."""
        assert state.proposed is not None, "a draft is proposed before it is scored"
        width, distribution = state.proposed.shape[1], categorical(scores.distribution)
        if not draft.is_chain:
            assert self.proactive is not None
            chain = self.proactive.chain(draft.nodes, distribution.size)
            distribution = distribution[:, [0, *(node + 1 for node in chain)]]
        rows = torch.arange(draft.batch, device=context.device)[:, None]
        least = zip(kept.accepted, kept.finished, strict=True)
        left = width - min((count for count, over in least if not over), default=width)
        done = kept.verdict.length[:, None]
        steps = torch.arange(left + 1, device=context.device)
        slot = (done + steps).clamp_max(width)  # (B, 1 + left): first the one just committed
        p = distribution[rows, slot]
        tokens, redrawn = state.proposed[:, :0], p[:, 1:]
        if left:
            old = slot[:, 1:].clamp_max(width - 1)
            position = scores.position[:, :1] + slot[:, 1:]
            was = Slots(
                redrawn,
                categorical(state.drafted)[rows, old],
                state.proposed[rows, old],
                slot[:, 1:] < width,
                position,
            )
            tokens, redrawn = self.suffix.redraw(was, context.noise)
        length = self.policy.observe(state.length, kept)
        known = (width - done[:, 0]).clamp_max(left)
        return JacobiWindow(tokens, Categorical.cat([p[:, :1], redrawn]), known, length, state.map)

    def _filled(
        self, context: Context, state: JacobiWindow, width: int
    ) -> tuple[Tensor, Categorical]:  # (B, width) x2
        """The carried slots, and guesses behind them."""
        tokens, distribution = state.tokens[:, :width], state.distribution[:, : 1 + width]
        carried = tokens.shape[1]
        new = torch.arange(width, device=context.device) >= state.known[:, None]
        tokens = torch.nn.functional.pad(tokens, (0, width - carried))
        guess = self.initial.fill(Frame(context, tokens, new, distribution, state.map))
        tokens = torch.where(new, guess, tokens)
        scores = one_hot(tokens, distribution.scores)
        known = ~new[:, :carried, None]
        scores[:, :carried] = torch.where(known, distribution.scores[:, 1:], scores[:, :carried])
        return tokens, Categorical(scores, distribution.hard)


@dataclass
class JacobiWindow:
    """What is carried from round to round."""

    tokens: Tensor  # (B, M) int64 redrawn slots, the next position first
    distribution: Categorical  # (B, 1 + M) of the last committed token, then of `tokens`
    known: Tensor  # (B,) how many of the M slots a row really has
    length: Any  # the state of the length policy
    map: Map | None
    proposed: Tensor | None = None  # (B, N) what was drafted in this round
    drafted: Categorical | None = None  # (B, N) and its distributions


def with_window(
    architecture: Callable[[Kit], Drafter],
    length: int,
    verifier: Verifier | Deferred[Verifier],
    options: Mapping[str, Any] = {},
    **parts: Any,
) -> Recipe:
    """A recipe whose drafts are the target's own distributions of the pass before, `length` tokens of them.

    `options` stand beside `initial`, which every such recipe offers; `parts` are further fields.
    """
    return Recipe(
        architecture=architecture,
        execution=Chain(Fixed(length)),
        verifier=verifier,
        sees="target-memory",
        options={"initial": "random", **options},
        **parts,
    )


def resampled_window(kit: Kit) -> Drafter:
    """A window whose unverified tokens are drawn anew each round (SJD)."""
    return _window(kit, Resample())


def maximally_coupled_window(kit: Kit) -> Drafter:
    """A window whose unverified tokens are kept as often as their distributions allow (MC-SJD)."""
    return _window(kit, CoupleMax())


def noise_sharing_window(kit: Kit) -> Drafter:
    """A window whose tokens are drawn with one noise per position (MC-SJD, Gumbel sharing)."""
    return _window(kit, CoupleGumbel())


def window_with_candidates(kit: Kit) -> Drafter:
    """A coupled window with further candidates at its first slots (SJD-PAC)."""
    proactive = Proactive(kit.options["depth"], kit.options["width"])
    return _window(kit, CoupleMax(), proactive)


def reused_window(kit: Kit) -> Drafter:
    """A window whose likely tokens are kept (SJD++)."""
    reuse = kit.options["reuse"]
    if reuse not in REUSE:
        raise ValueError(f"reuse={reuse!r} is not known; choose one of {', '.join(REUSE)}")
    return _window(kit, REUSE[reuse](kit.options["tau"]))


def _window(kit: Kit, suffix: Suffix, proactive: Proactive | None = None) -> Drafter:
    initial = initialiser(kit)
    return Jacobi(window_length(kit), suffix, initial, proactive=proactive)


def window_length(kit: Kit) -> Length:
    """Drafted tokens per round. Raises ValueError for a tree."""
    if not isinstance(kit.shape, Chain):
        raise ValueError("a Jacobi window is a chain; give length= instead of tree=")
    return kit.shape.length
