"""How far ahead a denoising chain is drafted: per image, decided before any noise is looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch

from mmspec.distributions.gaussian import Gaussian
from mmspec.distributions.kernels import GaussianKernel
from mmspec.draft import Draft, Round, Scores
from mmspec.errors import check_number, is_whole
from mmspec.recipe import LINEAR, TREE, Kit
from mmspec.targets.continuous.denoising import Trajectory
from mmspec.trees import Tree


class Pace(Protocol):
    """How many states a round should try to move each image.

    It may look at committed states and at what became of earlier drafts, never behind a rejection:
    the noise there will be used again.
    """

    def begin(self, context: Trajectory) -> Any: ...
    def wanted(self, state: Any, context: Trajectory) -> list[int]: ...  # per row
    def observe(self, state: Any, news: WindowNews) -> Any: ...


@dataclass(frozen=True)
class WindowNews:
    """What became of a round, for a `Pace`."""

    context: Trajectory  # after the round
    draft: Draft
    scores: Scores
    kept: Round
    levels: Sequence[int]  # how deep each row had drafted

    def begun(self, row: int) -> int:
        """The step at which a row stood before the round."""
        return self.context.step[row] - len(self.kept.tokens[row])

    def whole(self, row: int) -> bool:
        """Whether everything drafted was accepted."""
        return self.kept.accepted[row] == self.levels[row]


@dataclass
class Progress:
    """The state of a window during a request."""

    pace: Any
    levels: list[int]  # drafted in this round, per row
    whole: list[bool]  # whether the last draft was accepted whole; True before the first


@dataclass(frozen=True)
class Window:
    """A round moves an image by at most `most` states: drafted ones, and the target's own behind.

    The L of the papers. Window 1 drafts nothing: plain sampling. None is all that remain. `pace`
    chooses within that. `branching` widths make a tree: children per node, level by level, then 1.
    With `deterministic` the steps of a sampler that draw no noise are drafted too, which exact
    verifiers cannot judge.
    """

    most: int | None = None
    pace: Pace = field(default_factory=lambda: AdditivePace())
    branching: tuple[int, ...] = ()
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.most is not None:
            check_number("window", self.most, 1, whole=True, example=8)
        for width in self.branching:
            if not (is_whole(width) and width > 0):
                raise ValueError(
                    f"tree={list(self.branching)} has a level without a child; give whole widths "
                    "of 1 or more"
                )

    @classmethod
    def fixed(cls, most: int) -> Window:
        """Always as many states as that, while they last."""
        return cls(most, Constant())

    @classmethod
    def tree(cls, widths: Sequence[int]) -> Window:
        """A tree of `widths` children per level, and one state of the target behind it."""
        return cls(len(widths) + 1, Constant(), tuple(widths))

    def check(self, steps: int) -> None:
        """Refuse a window that no chain of `steps` states could fill."""
        if self.most is not None and self.most > steps:
            raise ValueError(
                f"a window of {self.most} states is longer than the chain, which has {steps}; give "
                "a shorter one, or more steps to the sampler"
            )

    def topology(self, depth: int) -> Tree:
        """The draft's tree down to `depth`."""
        return _topology(self.branching, depth)

    def begin(self, context: Trajectory) -> Progress:
        batch = context.batch
        return Progress(self.pace.begin(context), [0] * batch, [True] * batch)

    def levels(self, state: Progress, context: Trajectory) -> list[int]:
        """How many states to draft per row, in this round."""
        longest = context.kernel.steps if self.most is None else self.most
        wanted = [min(longest, most) - 1 for most in self.pace.wanted(state.pace, context)]
        room = context.room(max(max(wanted), 0), self.deterministic)
        state.levels = [max(min(pair), 0) for pair in zip(wanted, room, strict=True)]
        return state.levels

    def observe(
        self, state: Progress, context: Trajectory, draft: Draft, scores: Scores, kept: Round
    ) -> Progress:
        news = WindowNews(context, draft, scores, kept, state.levels)
        whole = [news.whole(row) for row in range(draft.batch)]
        return Progress(self.pace.observe(state.pace, news), state.levels, whole)

    @property
    def walk(self) -> str:
        return TREE if self.branching else LINEAR

    @property
    def words(self) -> str:
        most = "all" if self.most is None else str(self.most)
        paced = "" if self.pace == Constant() else f", paced by {self.pace!r}"
        if self.branching:
            widths = " x ".join(str(width) for width in self.branching)
            return f"tree of {widths} states in a window of {most}{paced}"
        return f"window of {most} states{paced}"


@dataclass(frozen=True)
class Constant:
    """Always `states`, or as far as the window goes."""

    states: int | None = None

    def __post_init__(self) -> None:
        if self.states is not None and self.states < 1:
            raise ValueError(f"a pace of {self.states} states moves nothing; give 1 or more")

    def begin(self, context: Trajectory) -> None:
        return None

    def wanted(self, state: None, context: Trajectory) -> list[int]:
        return [self.states or context.kernel.steps] * context.batch

    def observe(self, state: None, news: WindowNews) -> None:
        return None


@dataclass(frozen=True)
class AdditivePace:
    """One more after a draft accepted whole, else half as much again as what was committed.

    Each image has its own; starts at `start`.
    """

    start: int = 8
    least: int = 2

    def __post_init__(self) -> None:
        if not 2 <= self.least <= self.start:
            raise ValueError(
                f"least={self.least} and start={self.start} must be 2 or more (a window of 1 "
                "drafts nothing and would never learn), start not below least"
            )

    def begin(self, context: Trajectory) -> list[int]:
        return [self.start] * context.batch

    def wanted(self, state: list[int], context: Trajectory) -> list[int]:
        return state

    def observe(self, state: list[int], news: WindowNews) -> list[int]:
        return [self._next(most, row, news) for row, most in enumerate(state)]

    def _next(self, most: int, row: int, news: WindowNews) -> int:
        levels, committed = news.levels[row], news.kept.accepted[row] + 1
        if not levels:
            return most
        if news.whole(row):
            return max(most, levels + 2)
        return max(self.least, -(-3 * committed // 2))


@dataclass(frozen=True)
class Mismatch:
    """Draft while the means of draft and target should differ by at most `most` deviations.

    With a clean sample frozen at step a and an ideal denoiser, the mismatch r of step i has

        E r^2 = (s' - s) (mmse(s_a) - mmse(s)),    s = alpha^2 / sigma^2 at i, s' at i + 1.

    With mmse(s) = c / (1 + s), as of a normal distribution of variance 1, c is the one that fits
    what was seen in the last draft of the image, up to its first rejection. A mismatch of r is
    accepted with probability erfc(r / 8^.5). `start` states are tried before anything was seen. The
    first state of a draft, which may be the target's own, says nothing about c, so two at least are
    drafted.
    """

    most: float = 2.0
    start: int = 8
    least: int = 3

    def __post_init__(self) -> None:
        if self.most <= 0 or not 3 <= self.least <= self.start:
            raise ValueError(
                f"most={self.most} must be positive, least={self.least} and start={self.start} 3 "
                "or more, start not below least"
            )

    def begin(self, context: Trajectory) -> list[float | None]:
        return [None] * context.batch

    def wanted(self, state: list[float | None], context: Trajectory) -> list[int]:
        grid = _ratios(context.kernel)
        rows = zip(state, context.step, strict=True)
        return [self._reach(scale, grid, step) for scale, step in rows]

    def _reach(self, scale: float | None, grid: list[float], step: int) -> int:
        if scale is None:
            return self.start
        ahead = range(step + 1, len(grid))
        over = (i for i in ahead if scale * growth(grid, step, i) > self.most**2)
        return max(next(over, len(grid)) - step + 1, self.least)

    def observe(self, state: list[float | None], news: WindowNews) -> list[float | None]:
        drafted, distribution, draft = news.draft.distribution, news.scores.distribution, news.draft
        if not draft.nodes:
            return state
        assert isinstance(drafted, Gaussian)
        assert isinstance(distribution, Gaussian)
        rows = torch.arange(draft.batch, device=draft.tokens.device)[:, None]
        p = distribution[rows, draft.parents + 1]
        std = p.std.clamp_min(torch.finfo(p.std.dtype).tiny)
        squared = (((drafted.mean - p.mean) / std) ** 2).flatten(2).sum(-1).tolist()  # (B, N)
        grid = _ratios(news.context.kernel)
        return [self._fitted(old, row, news, squared[row], grid) for row, old in enumerate(state)]

    def _fitted(
        self, old: float | None, row: int, news: WindowNews, squared: list[float], grid: list[float]
    ) -> float | None:
        """c from the nodes below committed states: what lies behind a rejection stays unseen."""
        tree, step = news.draft.tree, news.begun(row)
        assert tree is not None
        committed = {-1, *news.kept.path[row]}
        fits = [
            (squared[node], growth(grid, step, step + tree.depths[node]))
            for node, parent in enumerate(tree.parents)
            if parent in committed and 0 < tree.depths[node] < news.levels[row]
        ]
        expected = sum(pair[1] for pair in fits)
        return sum(pair[0] for pair in fits) / expected if expected > 0 else old


def growth(grid: Sequence[float], seen: int, step: int) -> float:
    """(s' - s) (1 / (1 + s_a) - 1 / (1 + s)): how r^2 grows from the step of the prediction."""
    now = grid[step]
    later = grid[step + 1] if step + 1 < len(grid) else float("inf")
    return (later - now) * (1 / (1 + grid[seen]) - 1 / (1 + now))


def _ratios(kernel: GaussianKernel) -> list[float]:
    """Signal to noise, s = alpha^2 / sigma^2, of every state but the last."""
    ratios: list[float] = ((kernel.alpha[:-1] / kernel.sigma[:-1]) ** 2).tolist()
    return ratios


@lru_cache(maxsize=256)
def _topology(branching: tuple[int, ...], depth: int) -> Tree:
    return Tree.branching([*branching[:depth], *[1] * (depth - len(branching))])


def window_of(kit: Kit) -> Window:
    """The window of the recipe, which has to fit the chain."""
    if not isinstance(kit.shape, Window):
        raise ValueError(
            f"denoising chains are drafted in windows, not in {kit.shape!r}; give window= or tree="
        )
    kit.shape.check(kit.target.denoiser.kernel.steps)
    return kit.shape
