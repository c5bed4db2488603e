"""How far ahead a denoising chain is drafted: per image, decided before any noise is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch

from mmspec.distributions.gaussian import Gaussian
from mmspec.distributions.kernels import GaussianKernel
from mmspec.draft import Draft, Round, Scores
from mmspec.errors import check_number, is_integer
from mmspec.recipe import LINEAR, TREE, Kit
from mmspec.targets.continuous.denoising import Trajectory
from mmspec.trees import Tree


class Pace(Protocol):
    """How many states a round should try to advance each image.

    It may depend on committed states and on earlier verdicts, never on states after a rejection,
    whose noise will be used again.
    """

    def begin(self, context: Trajectory) -> Any: ...
    def target_sizes(self, state: Any, context: Trajectory) -> list[int]: ...  # per row
    def observe(self, state: Any, update: WindowUpdate) -> Any: ...


@dataclass(frozen=True)
class WindowUpdate:
    """The outcome of a round, for a `Pace`."""

    context: Trajectory  # after the round
    draft: Draft
    scores: Scores
    round: Round
    levels: Sequence[int]  # drafted depth of each row

    def start_step(self, row: int) -> int:
        """The step of a row before the round."""
        return self.context.step[row] - len(self.round.tokens[row])

    def is_fully_accepted(self, row: int) -> bool:
        """Whether all drafted states were accepted."""
        return self.round.accepted[row] == self.levels[row]


@dataclass
class Progress:
    """The state of a window during a request."""

    pace: Any
    levels: list[int]  # drafted in this round, per row
    is_fully_accepted: list[bool]  # whether the last draft was fully accepted; True at first


@dataclass(frozen=True)
class Window:
    """A round advances an image by at most `max_states`: drafted states and one of the target.

    The L of the papers. Window 1 drafts nothing: plain sampling. None is all remaining states.
    `pace` chooses within that. `branching` widths make a tree: children per node, level by level,
    then 1. With `deterministic` the noiseless steps of a sampler are drafted too, which exact
    verifiers do not support.
    """

    max_states: int | None = None
    pace: Pace = field(default_factory=lambda: AdditivePace())
    branching: tuple[int, ...] = ()
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.max_states is not None:
            check_number("window", self.max_states, 1, whole=True, example=8)
        for width in self.branching:
            if not (is_integer(width) and width > 0):
                raise ValueError(
                    f"tree={list(self.branching)} has a level without a child; give whole widths "
                    "of 1 or more"
                )

    @classmethod
    def constant(cls, max_states: int) -> Window:
        """Always `max_states` states, or all that remain."""
        return cls(max_states, Constant())

    @classmethod
    def tree(cls, widths: Sequence[int]) -> Window:
        """A tree of `widths` children per level, and one state of the target after it."""
        return cls(len(widths) + 1, Constant(), tuple(widths))

    def check(self, steps: int) -> None:
        """Raises ValueError for a window longer than a chain of `steps` states."""
        if self.max_states is not None and self.max_states > steps:
            raise ValueError(
                f"a window of {self.max_states} states is longer than the chain, which has "
                f"{steps}; give a shorter one, or more steps to the sampler"
            )

    def topology(self, depth: int) -> Tree:
        """The draft's tree down to `depth`."""
        return _topology(self.branching, depth)

    def begin(self, context: Trajectory) -> Progress:
        batch = context.batch
        return Progress(self.pace.begin(context), [0] * batch, [True] * batch)

    def levels(self, state: Progress, context: Trajectory) -> list[int]:
        """The number of states to draft in this round, per row."""
        longest = context.kernel.num_steps if self.max_states is None else self.max_states
        target_sizes = [
            min(longest, size) - 1 for size in self.pace.target_sizes(state.pace, context)
        ]
        remaining = context.max_draft_lengths(max(max(target_sizes), 0), self.deterministic)
        state.levels = [max(min(pair), 0) for pair in zip(target_sizes, remaining, strict=True)]
        return state.levels

    def observe(
        self, state: Progress, context: Trajectory, draft: Draft, scores: Scores, round_: Round
    ) -> Progress:
        news = WindowUpdate(context, draft, scores, round_, state.levels)
        is_fully_accepted = [news.is_fully_accepted(row) for row in range(draft.batch)]
        return Progress(self.pace.observe(state.pace, news), state.levels, is_fully_accepted)

    @property
    def walk(self) -> str:
        return TREE if self.branching else LINEAR

    @property
    def description(self) -> str:
        size = "all" if self.max_states is None else str(self.max_states)
        paced = "" if self.pace == Constant() else f", paced by {self.pace!r}"
        if self.branching:
            widths = " x ".join(str(width) for width in self.branching)
            return f"tree of {widths} states in a window of {size}{paced}"
        return f"window of {size} states{paced}"


@dataclass(frozen=True)
class Constant:
    """Always `states`, or as far as the window allows."""

    states: int | None = None

    def __post_init__(self) -> None:
        if self.states is not None and self.states < 1:
            raise ValueError(f"a pace of {self.states} states makes no progress; give 1 or more")

    def begin(self, context: Trajectory) -> None:
        return None

    def target_sizes(self, state: None, context: Trajectory) -> list[int]:
        return [self.states or context.kernel.num_steps] * context.batch

    def observe(self, state: None, update: WindowUpdate) -> None:
        return None


@dataclass(frozen=True)
class AdditivePace:
    """One more state after full acceptance, else 1.5 times what was committed.

    Each image has its own pace, starting at `start`.
    """

    start: int = 8
    min_states: int = 2

    def __post_init__(self) -> None:
        if not 2 <= self.min_states <= self.start:
            raise ValueError(
                f"min_states={self.min_states} and start={self.start} must be 2 or more (a window "
                "of 1 drafts nothing and never grows), and start not below min_states"
            )

    def begin(self, context: Trajectory) -> list[int]:
        return [self.start] * context.batch

    def target_sizes(self, state: list[int], context: Trajectory) -> list[int]:
        return state

    def observe(self, state: list[int], update: WindowUpdate) -> list[int]:
        return [self._next(size, row, update) for row, size in enumerate(state)]

    def _next(self, size: int, row: int, update: WindowUpdate) -> int:
        levels, committed = update.levels[row], update.round.accepted[row] + 1
        if not levels:
            return size
        if update.is_fully_accepted(row):
            return max(size, levels + 2)
        return max(self.min_states, -(-3 * committed // 2))


@dataclass(frozen=True)
class Mismatch:
    """Draft while draft and target means should differ by at most `max_deviations` deviations.

    With a clean sample frozen at step a and an ideal denoiser, the mismatch r of step i has

        E r^2 = (s' - s) (mmse(s_a) - mmse(s)),    s = alpha^2 / sigma^2 at i, s' at i + 1.

    With mmse(s) = c / (1 + s), as of a normal distribution of variance 1, c is fitted to the last
    draft of the image, up to its first rejection. A mismatch of r is accepted with probability
    erfc(r / 8^.5). `start` states are tried at first. The first state of a draft, which may be the
    target's own, carries no information about c, so at least two are drafted.
    """

    max_deviations: float = 2.0
    start: int = 8
    min_states: int = 3

    def __post_init__(self) -> None:
        if self.max_deviations <= 0 or not 3 <= self.min_states <= self.start:
            raise ValueError(
                f"max_deviations={self.max_deviations} must be positive, "
                f"min_states={self.min_states} and start={self.start} 3 or more, and start not "
                "below min_states"
            )

    def begin(self, context: Trajectory) -> list[float | None]:
        return [None] * context.batch

    def target_sizes(self, state: list[float | None], context: Trajectory) -> list[int]:
        grid = _ratios(context.kernel)
        rows = zip(state, context.step, strict=True)
        return [self._num_states(scale, grid, step) for scale, step in rows]

    def _num_states(self, scale: float | None, grid: list[float], step: int) -> int:
        if scale is None:
            return self.start
        ahead = range(step + 1, len(grid))
        over = (i for i in ahead if scale * mismatch_growth(grid, step, i) > self.max_deviations**2)
        return max(next(over, len(grid)) - step + 1, self.min_states)

    def observe(self, state: list[float | None], update: WindowUpdate) -> list[float | None]:
        drafted, distribution, draft = (
            update.draft.distribution,
            update.scores.distribution,
            update.draft,
        )
        if not draft.nodes:
            return state
        assert isinstance(drafted, Gaussian)
        assert isinstance(distribution, Gaussian)
        rows = torch.arange(draft.batch, device=draft.tokens.device)[:, None]
        p = distribution[rows, draft.parents + 1]
        std = p.std.clamp_min(torch.finfo(p.std.dtype).tiny)
        squared = (((drafted.mean - p.mean) / std) ** 2).flatten(2).sum(-1).tolist()  # (B, N)
        grid = _ratios(update.context.kernel)
        return [
            self._fit_scale(old, row, update, squared[row], grid) for row, old in enumerate(state)
        ]

    def _fit_scale(
        self,
        old: float | None,
        row: int,
        update: WindowUpdate,
        squared: list[float],
        grid: list[float],
    ) -> float | None:
        """c from the nodes below committed states; states after a rejection are not used."""
        tree, step = update.draft.tree, update.start_step(row)
        assert tree is not None
        committed = {-1, *update.round.path[row]}
        fits = [
            (squared[node], mismatch_growth(grid, step, step + tree.depths[node]))
            for node, parent in enumerate(tree.parents)
            if parent in committed and 0 < tree.depths[node] < update.levels[row]
        ]
        expected = sum(pair[1] for pair in fits)
        return sum(pair[0] for pair in fits) / expected if expected > 0 else old


def mismatch_growth(grid: Sequence[float], predicted_at: int, step: int) -> float:
    """(s' - s) (1 / (1 + s_a) - 1 / (1 + s)): growth of r^2 from the step of the prediction."""
    now = grid[step]
    later = grid[step + 1] if step + 1 < len(grid) else float("inf")
    return (later - now) * (1 / (1 + grid[predicted_at]) - 1 / (1 + now))


def _ratios(kernel: GaussianKernel) -> list[float]:
    """Signal-to-noise ratio, s = alpha^2 / sigma^2, of every state but the last."""
    ratios: list[float] = ((kernel.alpha[:-1] / kernel.sigma[:-1]) ** 2).tolist()
    return ratios


@lru_cache(maxsize=256)
def _topology(branching: tuple[int, ...], depth: int) -> Tree:
    return Tree.branching([*branching[:depth], *[1] * (depth - len(branching))])


def window_of(kit: Kit) -> Window:
    """The window of the recipe, checked against the length of the chain."""
    if not isinstance(kit.shape, Window):
        raise ValueError(
            f"denoising chains are drafted in windows, not in {kit.shape!r}; give window= or tree="
        )
    kit.shape.check(kit.target.denoiser.kernel.num_steps)
    return kit.shape
