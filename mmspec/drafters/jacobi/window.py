"""Jacobi drafting: the target's predictions after a rejected token are the next draft.

A window of four drafted tokens over one round; a dot is a slot without a prediction.

    drafted        x0 x1 x2 x3 .     one forward: a distribution for every slot and one after them
    last verdict   x0 y              x1 rejected, y committed in its place
    carried over         x2 x3 x4    redrawn from the new distributions by the suffix policy, x4 new
    next                 x2 x3 x4 x5 x5 is a guess of the initialiser
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec._attributes import delegate_to
from mmspec.codes.grid import Grid
from mmspec.distributions.categorical import Categorical, as_categorical
from mmspec.draft import Draft, Drafter, Kind, Round, Scores, Verifier
from mmspec.drafters.jacobi.initial import (
    GridMap,
    Initialiser,
    StructuralInitial,
    WindowFrame,
    initialiser,
)
from mmspec.drafters.jacobi.suffix import (
    REUSE,
    CoupleGumbel,
    CoupleMax,
    Resample,
    SuffixPolicy,
    WindowSlots,
    one_hot,
)
from mmspec.drafters.jacobi.tree import ProactiveTree
from mmspec.drafters.lengths.goodput import parse
from mmspec.drafters.lengths.length import Fixed, Length
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Deferred, Kit, Recipe
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True)
class Jacobi(Drafter):
    """The target drafts from the distributions of its last pass (SJD, Teng et al. 2025).

    `length` counts drafted tokens: a window of L in the papers includes the committed token and is
    length L - 1; 0 is plain decoding. `suffix` redraws the tokens after a rejected one, `initial`
    guesses new slots. Without a `grid` the target's `context.shared["grid"]` is used, if it has
    one. Rows accept independently.

    Verify with a rule that decides position by position (`Recursive`, `Coupled`): a verifier that
    looks ahead depends on the tokens that a coupling policy carries over. Whether a draft records
    its distributions depends on `suffix`.
    """

    length: int | str | Length = 15
    suffix: SuffixPolicy = field(default_factory=Resample)
    initial: Initialiser = field(default_factory=StructuralInitial)
    grid: Grid | None = None
    proactive: ProactiveTree | None = None
    sees: ClassVar[str] = "target-memory"

    def __post_init__(self) -> None:
        assert self.policy.max_length >= 0  # parses the length

    @cached_property
    def policy(self) -> Length:
        return parse(self.length)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return (Kind.WOR,) if self.uses_trees else (Kind.IID,)

    @property
    def uses_trees(self) -> bool:
        return self.proactive is not None and self.proactive.width > 1

    records_distribution = delegate_to("suffix.records_distribution")
    carries_tokens = delegate_to("suffix.carries_tokens")

    def begin(self, context: Context) -> JacobiWindow:
        assert context.scores is not None, (
            "a request begins with the distribution of its first token"
        )
        grid = context.shared.get("grid") if self.grid is None else self.grid
        first = torch.zeros(context.batch, dtype=torch.int64, device=context.device)
        return JacobiWindow(
            tokens=first[:, None][:, :0],
            distribution=as_categorical(context.scores.distribution),
            num_known=first,
            length=self.policy.begin(),
            map=None if grid is None else GridMap.of(grid, context.device),
        )

    def propose(self, context: Context, state: JacobiWindow) -> Draft:
        width = self.policy.budget(state.length, context)
        tokens, distribution = state.tokens[:, :width], state.distribution[:, 1 : 1 + width]
        if width:
            tokens, distribution = self._fill_window(context, state, width)
        state.draft_tokens, state.draft_distribution = tokens, distribution
        if not width:
            return Draft.empty(context.batch, context.device)
        if not self.uses_trees:
            return Draft.chain(tokens, Kind.IID, distribution)
        assert self.proactive is not None
        return self.proactive.spread(tokens, distribution, context.noise)

    def observe(
        self, context: Context, state: JacobiWindow, draft: Draft, scores: Scores, round_: Round
    ) -> JacobiWindow:
        """Move the window past the committed tokens and redraw the rest."""
        assert state.draft_tokens is not None, "a draft is proposed before it is scored"
        width, distribution = state.draft_tokens.shape[1], as_categorical(scores.distribution)
        if not draft.is_chain:
            assert self.proactive is not None
            chain = self.proactive.chain(draft.nodes, distribution.size)
            distribution = distribution[:, [0, *(node + 1 for node in chain)]]
        rows = torch.arange(draft.batch, device=context.device)[:, None]
        pairs = zip(round_.accepted, round_.finished, strict=True)
        left = width - min(
            (count for count, is_finished in pairs if not is_finished), default=width
        )
        done = round_.verdict.length[:, None]
        steps = torch.arange(left + 1, device=context.device)
        slot = (done + steps).clamp_max(width)  # (B, 1 + left): first the one just committed
        p = distribution[rows, slot]
        tokens, redrawn = state.draft_tokens[:, :0], p[:, 1:]
        if left:
            old = slot[:, 1:].clamp_max(width - 1)
            position = scores.position[:, :1] + slot[:, 1:]
            slots = WindowSlots(
                redrawn,
                as_categorical(state.draft_distribution)[rows, old],
                state.draft_tokens[rows, old],
                slot[:, 1:] < width,
                position,
            )
            tokens, redrawn = self.suffix.redraw(slots, context.noise)
        length = self.policy.observe(state.length, round_)
        num_known = (width - done[:, 0]).clamp_max(left)
        return JacobiWindow(
            tokens, Categorical.cat([p[:, :1], redrawn]), num_known, length, state.map
        )

    def _fill_window(
        self, context: Context, state: JacobiWindow, width: int
    ) -> tuple[Tensor, Categorical]:  # (B, width) x2
        """The slots carried over, and guesses for the slots after them."""
        tokens, distribution = state.tokens[:, :width], state.distribution[:, : 1 + width]
        carried = tokens.shape[1]
        new = torch.arange(width, device=context.device) >= state.num_known[:, None]
        tokens = torch.nn.functional.pad(tokens, (0, width - carried))
        guess = self.initial.fill(WindowFrame(context, tokens, new, distribution, state.map))
        tokens = torch.where(new, guess, tokens)
        scores = one_hot(tokens, distribution.scores)
        num_known = ~new[:, :carried, None]
        scores[:, :carried] = torch.where(
            num_known, distribution.scores[:, 1:], scores[:, :carried]
        )
        return tokens, Categorical(scores, distribution.hard)


@dataclass
class JacobiWindow:
    """The state between rounds."""

    tokens: Tensor  # (B, M) int64 redrawn slots, the next position first
    distribution: Categorical  # (B, 1 + M) of the last committed token, then of `tokens`
    num_known: Tensor  # (B,) how many of the M slots are valid
    length: Any  # the state of the length policy
    map: GridMap | None
    draft_tokens: Tensor | None = None  # (B, N) drafted in this round
    draft_distribution: Categorical | None = None  # (B, N) and its distributions


def with_window(
    architecture: Callable[[Kit], Drafter],
    length: int,
    verifier: Verifier | Deferred[Verifier],
    options: Mapping[str, Any] = {},
    **parts: Any,
) -> Recipe:
    """A recipe that drafts `length` tokens from the target's distributions of the previous pass.

    `options` extend `initial`, which every such recipe has; `parts` are further fields of the
    recipe.
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
    """A window whose unverified tokens are resampled each round (SJD)."""
    return _window(kit, Resample())


def maximally_coupled_window(kit: Kit) -> Drafter:
    """A window whose unverified tokens are kept by maximal coupling (MC-SJD)."""
    return _window(kit, CoupleMax())


def noise_sharing_window(kit: Kit) -> Drafter:
    """A window whose tokens are drawn with one noise per position (MC-SJD, Gumbel sharing)."""
    return _window(kit, CoupleGumbel())


def window_with_candidates(kit: Kit) -> Drafter:
    """A coupled window with further candidates in its first slots (SJD-PAC)."""
    proactive = ProactiveTree(kit.options["depth"], kit.options["width"])
    return _window(kit, CoupleMax(), proactive)


def reused_window(kit: Kit) -> Drafter:
    """A window that keeps probable tokens (SJD++)."""
    reuse = kit.options["reuse"]
    if reuse not in REUSE:
        raise ValueError(f"reuse={reuse!r} is not known; choose one of {', '.join(REUSE)}")
    return _window(kit, REUSE[reuse](kit.options["tau"]))


def _window(kit: Kit, suffix: SuffixPolicy, proactive: ProactiveTree | None = None) -> Drafter:
    initial = initialiser(kit)
    return Jacobi(window_length(kit), suffix, initial, proactive=proactive)


def window_length(kit: Kit) -> Length:
    """Drafted tokens per round. Raises ValueError for a tree."""
    if not isinstance(kit.shape, Chain):
        raise ValueError("a Jacobi window is a chain; give length= instead of tree=")
    return kit.shape.length
