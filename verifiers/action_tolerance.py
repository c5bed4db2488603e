"""Action tokens that lie close to the target's own are as good as those."""

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
from mmspec.verifiers.walk import check, longest

KEEPS = ("draft", "target")
METRICS = ("bins", "physical")
KINDS = (Kind.DET, Kind.RACE, Kind.IID, Kind.WOR, Kind.HUB)
# the knobs of recipes with a fixed radius, as `within_radius` reads them
OPTIONS = {"radius": 9.0, "radii": None, "metric": "bins", "strict": None, "keep": "draft"}


class Radius(ABC):
    """How far a token may lie from the target's, in bins."""

    learns: ClassVar[bool] = False  # whether it is told what was kept

    @abstractmethod
    def limits(self, context: Any) -> Tensor:  # (1 or B, D) float64
        """Of every component at this step; 0 = the target's own token alone."""

    @property
    @abstractmethod
    def is_zero(self) -> bool:
        """Whether nothing but the target's own token ever passes."""

    def learn(self, episode: Episode, dims: Sequence[int], bins: Sequence[float]) -> None:
        """Note what was kept at this step: components, and how far they lay off."""
        raise AssertionError("a radius that does not learn is told nothing")


@dataclass(frozen=True)
class FixedRadius(Radius):
    """The same distance at every step, per component (Wang et al. 2025, Spec-VLA: 9 bins)."""

    bins: tuple[float, ...]

    @classmethod
    def of(
        cls,
        space: ActionSpace,
        radius: float | Sequence[float] | Mapping[str, float],
        metric: str = "bins",
    ) -> FixedRadius:
        """One distance for all, one per component, or one per group; strict components have 0.

        `metric` is "bins", or "physical": the robot's units. Raises ValueError for distances below
        0, too few or too many of them, groups that there are not, and another metric.
        """
        if metric not in METRICS:
            raise ValueError(f"metric={metric!r} is not known; choose {' or '.join(METRICS)}")
        given = _per_dim(space, radius)
        if metric == "physical":
            # the smallest excess over a whole number of bins is rounding
            given = [
                float("inf") if not size else one / size + 1e-9
                for one, size in zip(given, space.bin_size.tolist(), strict=True)
            ]
        return cls(tuple(_strict(space, given)))

    @property
    def is_zero(self) -> bool:
        return max(self.bins) < 1

    def limits(self, context: Any) -> Tensor:  # (1, D)
        return torch.tensor([self.bins], dtype=torch.float64)


class ActionWalk(Verifier):
    """Keeps a path of actions close to the target's; then follows the target's own token.

    The component of a token is told by its place in the answer, so `within` comes first. The
    verdict's excess counts kept tokens that are not the target's.
    """

    space: ActionSpace
    now: Any  # what it knows of this round; None = `within` was not called
    kinds: ClassVar[tuple[Kind, ...]] = KINDS

    @property
    def couples(self) -> bool:
        return self.lossless

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check(self, draft, distribution=False)
        if self.now is None:
            raise ValueError("a tolerance goes by the component of a token; call within() first")
        own = target_tokens(draft, scores, noise)
        if not draft.nodes:
            none = draft.tokens.sum(-1)
            return Verdict(draft.tokens, none, own[:, 0])
        wanted = own.gather(1, draft.parents + 1)
        off = bins_off(self.space.codes, draft.tokens, wanted)
        path, length, row = self.near(draft, wanted, off)
        misses = ((path >= 0) & (draft.tokens != wanted).gather(1, path.clamp_min(0))).sum(-1)
        over = None if self.lossless else misses.double()
        next_token = own.gather(1, row[:, None])[:, 0]
        return Verdict(path, length, next_token, over, self.replaced(wanted))

    @abstractmethod
    def near(self, draft: Draft, wanted: Tensor, off: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Path (B, D), its length (B,) and the row of its end (B,); `off` (B, N) is in bins."""

    def replaced(self, wanted: Tensor) -> Tensor | None:  # (B, N)
        """What is said in the place of drafted tokens that are kept; None = those."""
        return None


@dataclass(frozen=True)
class ActionTolerance(ActionWalk):
    """Keep drafted actions within a radius of the target's own token (Spec-VLA, Wang et al. 2025).

    A token c passes if both it and the target's token t are actions and |c - t| <= r, in bins of
    its component, or if they are equal: padding and an end of sequence never pass by their
    distance. t is what the target says behind the drafted tokens before, greedily or, when
    sampling, with the noise of its position. The longest path that passes is kept, of several the
    one whose tokens lie closest to the target's; then follows the target's own token. The component
    of a token is told by its place in the answer, see `ActionSpace.dims_at`.

    Every number kept differs from the target's, given the kept tokens before, by at most r times
    `ActionSpace.bin_size`. `keep="target"` says the target's token in the place of each that
    passed; later tokens were still predicted behind the drafted ones, so this is lossy, too.
    Lossy; with a radius below 1 it is `Coupled`: plain decoding with the same seed. The verdict's
    excess counts kept tokens that are not the target's.

    Raises ValueError for another `keep`.
    """

    space: ActionSpace
    radius: Radius
    keep: str = "draft"
    now: _Now | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.keep not in KEEPS:
            raise ValueError(f"keep={self.keep!r} is not known; choose {' or '.join(KEEPS)}")

    @property
    def lossless(self) -> bool:
        return self.radius.is_zero

    @property
    def words(self) -> str:
        return f"longest path within {self.radius!r}"

    def within(self, context: Any) -> Verifier:
        return replace(self, now=_Now.of(context, self.radius.limits(context)))

    def near(self, draft: Draft, wanted: Tensor, off: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert self.now is not None
        dims = self.space.dims_at(self.now.said, draft.places())
        limits = self.now.limits.to(off.device).expand(draft.batch, -1).gather(1, dims)
        path, length, row = longest(draft, off <= limits, -off.clamp_max(self.space.codes.bins))
        if self.radius.learns:
            self._learn(self.now.episodes, path, dims, off)
        return path, length, row

    def replaced(self, wanted: Tensor) -> Tensor | None:
        return wanted if self.keep == "target" else None

    def _learn(self, episodes: Sequence[Episode], path: Tensor, dims: Tensor, off: Tensor) -> None:
        at = path.clamp_min(0)
        where, far = dims.gather(1, at).tolist(), off.gather(1, at).tolist()
        for row, nodes in enumerate(path.tolist()):
            count = sum(node >= 0 for node in nodes)
            if count:
                self.radius.learn(episodes[row], where[row][:count], far[row][:count])


@dataclass(frozen=True)
class _Now:
    """What a tolerance knows of a round."""

    said: tuple[int, ...]  # tokens of the answer so far, per row
    limits: Tensor  # (1 or B, D)
    episodes: Sequence[Episode]  # none where the call gave none

    @classmethod
    def of(cls, context: Any, limits: Tensor) -> _Now:
        said = tuple(context.generated(row) for row in range(context.batch))
        return cls(said, limits, context.shared.get("episodes", ()))


def bins_off(codes: ActionCodes, x: Tensor, wanted: Tensor) -> Tensor:  # (...) x2 -> (...) float64
    """How many bins a token lies from the wanted one; infinitely many where either is no action."""
    both = codes.contains(x) & codes.contains(wanted)
    off = (x - wanted).abs().double()
    return torch.where(both | (x == wanted), off, torch.inf)


def space_of(kit: Kit) -> ActionSpace:
    """The action space, with the option `strict`: the components that no tolerance applies to."""
    strict = kit.options["strict"]
    return kit.space if strict is None else kit.space.with_strict(strict)


def within_radius(kit: Kit) -> Verifier:
    """A fixed radius out of the options, as a verifier."""
    return ActionTolerance(space_of(kit), fixed_radius(kit), kit.options["keep"])


def fixed_radius(kit: Kit) -> FixedRadius:
    """The one that the options say; `radii` are those of all components or groups."""
    options = kit.options
    radius = options["radius"] if options["radii"] is None else options["radii"]
    return FixedRadius.of(space_of(kit), radius, options["metric"])


def _per_dim(
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
        if one != float("inf"):
            check_number("radius", one, 0, example=9)
    return [float(one) for one in given]


def _strict(space: ActionSpace, limits: Sequence[float]) -> list[float]:
    return [0.0 if dim.is_strict else one for dim, one in zip(space.dims, limits, strict=True)]
