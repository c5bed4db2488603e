"""Accept action tokens within a radius of the target's token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.codes.actions import ActionCodes, ActionSpace
from mmspec.codes.episodes import Episode
from mmspec.distributions.noise import Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.errors import check_number
from mmspec.recipe import Kit
from mmspec.verifiers.coupled import target_tokens
from mmspec.verifiers.walk import check_draft, find_longest_path

KEEPS = ("draft", "target")
METRICS = ("bins", "physical")
KINDS = (Kind.DET, Kind.RACE, Kind.IID, Kind.WOR, Kind.HUB)
# options of recipes with a fixed radius, read by `build_tolerance`
OPTIONS = {"radius": 9.0, "radii": None, "metric": "bins", "strict": None, "keep": "draft"}


class Radius(ABC):
    """The accepted distance of a token from the target's, in bins."""

    is_adaptive: ClassVar[bool] = False  # whether it needs the deviations of accepted tokens

    @abstractmethod
    def limits(self, context: Any) -> Tensor:  # (1 or B, D) float64
        """The limit of every component at this step; 0 = only the target's token."""

    @property
    @abstractmethod
    def is_zero(self) -> bool:
        """Whether only the target's token passes."""

    def record_deviation(
        self, episode: Episode, dims: Sequence[int], bins: Sequence[float]
    ) -> None:
        """Record the accepted tokens of this step: components, and distances from the target."""
        raise AssertionError("a radius that is not adaptive records nothing")


@dataclass(frozen=True)
class FixedRadius(Radius):
    """The same distance at every step, per component (Wang et al. 2025, Spec-VLA: 9 bins)."""

    bins: tuple[float, ...]

    @classmethod
    def from_options(
        cls,
        space: ActionSpace,
        radius: float | Sequence[float] | Mapping[str, float],
        metric: str = "bins",
    ) -> FixedRadius:
        """One distance for all, one per component, or one per group; strict components have 0.

        `metric` is "bins" or "physical" (the robot's units). Raises ValueError for negative
        distances, a wrong number of them, unknown groups, and an unknown metric.
        """
        if metric not in METRICS:
            raise ValueError(f"metric={metric!r} is not known; choose {' or '.join(METRICS)}")
        given = _expand_radius(space, radius)
        if metric == "physical":
            # 1e-9: tolerate rounding above a whole number of bins
            given = [
                float("inf") if not size else one / size + 1e-9
                for one, size in zip(given, space.bin_size.tolist(), strict=True)
            ]
        return cls(tuple(_zero_strict(space, given)))

    @property
    def is_zero(self) -> bool:
        return max(self.bins) < 1

    def limits(self, context: Any) -> Tensor:  # (1, D)
        return torch.tensor([self.bins], dtype=torch.float64)


class ActionWalk(Verifier):
    """Accepts a path of actions close to the target's, then adds the target's token.

    The component of a token follows from its position in the output, so `within` must be called
    first. The verdict's excess counts accepted tokens that differ from the target's.
    """

    space: ActionSpace
    state: Any  # of this round; None = `within` was not called
    kinds: ClassVar[tuple[Kind, ...]] = KINDS

    @property
    def couples(self) -> bool:
        return self.lossless

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check_draft(self, draft, distribution=False)
        if self.state is None:
            raise ValueError("a tolerance depends on the component of a token; call within() first")
        own = target_tokens(draft, scores, noise)
        if not draft.nodes:
            none = draft.tokens.sum(-1)
            return Verdict(draft.tokens, none, own[:, 0])
        target = own.gather(1, draft.parents + 1)
        off = bin_distance(self.space.codes, draft.tokens, target)
        path, length, row = self.select_path(draft, target, off)
        misses = ((path >= 0) & (draft.tokens != target).gather(1, path.clamp_min(0))).sum(-1)
        over = None if self.lossless else misses.double()
        next_token = own.gather(1, row[:, None])[:, 0]
        return Verdict(path, length, next_token, over, self.replacement_tokens(target))

    @abstractmethod
    def select_path(
        self, draft: Draft, target: Tensor, off: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Path (B, D), its length (B,) and the row of its end (B,); `off` (B, N) is in bins."""

    def replacement_tokens(self, target: Tensor) -> Tensor | None:  # (B, N)
        """Tokens that replace the accepted drafted ones; None = keep the drafted ones."""
        return None


@dataclass(frozen=True)
class ActionTolerance(ActionWalk):
    """Accept drafted actions within a radius of the target's token (Spec-VLA, Wang et al. 2025).

    A token c passes if c and the target's token t are both actions and |c - t| <= r, in bins of its
    component, or if they are equal; padding and end of sequence pass only if equal. t is the
    target's token given the drafted tokens before, greedy or sampled with the noise of its
    position. The longest path that passes is accepted, of several the one closest to the target's
    tokens; then follows the target's token. `ActionSpace.dims_at` maps positions to components.

    Every accepted value differs from the target's, given the accepted tokens before, by at most r
    times `ActionSpace.bin_size`. `keep="target"` emits the target's token instead of each that
    passed. Later tokens were predicted from the drafted ones, so this is lossy as well.
    Lossy; with a radius below 1 it is `Coupled`: plain decoding with the same seed. The verdict's
    excess counts accepted tokens that differ from the target's.

    Raises ValueError for another `keep`.
    """

    space: ActionSpace
    radius: Radius
    keep: str = "draft"
    state: _RoundState | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.keep not in KEEPS:
            raise ValueError(f"keep={self.keep!r} is not known; choose {' or '.join(KEEPS)}")

    @property
    def lossless(self) -> bool:
        return self.radius.is_zero

    @property
    def description(self) -> str:
        return f"longest path within {self.radius!r}"

    def bind_context(self, context: Any) -> Verifier:
        return replace(self, state=_RoundState.from_context(context, self.radius.limits(context)))

    def select_path(
        self, draft: Draft, target: Tensor, off: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert self.state is not None
        dims = self.space.dims_at(self.state.generated, draft.relative_positions())
        limits = self.state.limits.to(off.device).expand(draft.batch, -1).gather(1, dims)
        path, length, row = find_longest_path(
            draft, off <= limits, -off.clamp_max(self.space.codes.bins)
        )
        if self.radius.is_adaptive:
            self._record_deviations(self.state.episodes, path, dims, off)
        return path, length, row

    def replacement_tokens(self, target: Tensor) -> Tensor | None:
        return target if self.keep == "target" else None

    def _record_deviations(
        self, episodes: Sequence[Episode], path: Tensor, dims: Tensor, off: Tensor
    ) -> None:
        at = path.clamp_min(0)
        where, far = dims.gather(1, at).tolist(), off.gather(1, at).tolist()
        for row, nodes in enumerate(path.tolist()):
            count = sum(node >= 0 for node in nodes)
            if count:
                self.radius.record_deviation(episodes[row], where[row][:count], far[row][:count])


@dataclass(frozen=True)
class _RoundState:
    """The context that a tolerance needs in a round."""

    generated: tuple[int, ...]  # number of tokens generated so far, per row
    limits: Tensor  # (1 or B, D)
    episodes: Sequence[Episode]  # empty if the call has none

    @classmethod
    def from_context(cls, context: Any, limits: Tensor) -> _RoundState:
        generated = tuple(context.num_generated(row) for row in range(context.batch))
        return cls(generated, limits, context.shared.get("episodes", ()))


def bin_distance(
    codes: ActionCodes, x: Tensor, target: Tensor
) -> Tensor:  # (...) x2 -> (...) float64
    """Distance of a token from the target's in bins; infinite where either is no action."""
    both = codes.contains(x) & codes.contains(target)
    off = (x - target).abs().double()
    return torch.where(both | (x == target), off, torch.inf)


def resolve_space(kit: Kit) -> ActionSpace:
    """The action space; the option `strict` lists the components without tolerance."""
    strict = kit.options["strict"]
    return kit.space if strict is None else kit.space.with_strict(strict)


def build_tolerance(kit: Kit) -> Verifier:
    """A verifier with the fixed radius of the options."""
    return ActionTolerance(resolve_space(kit), build_fixed_radius(kit), kit.options["keep"])


def build_fixed_radius(kit: Kit) -> FixedRadius:
    """The radius of the options; `radii` has one per component or group."""
    options = kit.options
    radius = options["radius"] if options["radii"] is None else options["radii"]
    return FixedRadius.from_options(resolve_space(kit), radius, options["metric"])


def _expand_radius(
    space: ActionSpace, radius: float | Sequence[float] | Mapping[str, float]
) -> list[float]:
    """One distance per component."""
    if isinstance(radius, Mapping):
        unknown = sorted(set(radius) ^ set(space.groups))
        if unknown:
            raise ValueError(
                f"radius names {', '.join(radius)}, but the groups of this action are "
                f"{', '.join(space.groups)}; give one for each of them"
            )
        given = [radius[dim.group] for dim in space.dims]
    elif isinstance(radius, Sequence) and not isinstance(radius, str):
        given = list(radius)
    else:
        given = [radius] * space.size
    if len(given) != space.size:
        raise ValueError(
            f"{len(given)} radii for an action of {space.size} components; give one for each, or a "
            "single one"
        )
    for one in given:
        if not (isinstance(one, float) and one == float("inf")):
            check_number("radius", one, 0, example=9)
    return [float(one) for one in given]


def _zero_strict(space: ActionSpace, limits: Sequence[float]) -> list[float]:
    return [0.0 if dim.is_strict else one for dim, one in zip(space.dims, limits, strict=True)]
