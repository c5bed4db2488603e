"""The tokens of robot actions: which id is which bin, and which number a robot gets for it.

An action has D components, said one token each in a fixed order. The last `bins` ids of the
vocabulary stand for them, a larger value for a smaller id (RT-2, OpenVLA). Shown for a vocabulary
of 32000 and 256 bins:

    value     -1     0.0    0.5    0.99   1
    id      31999  31872  31808  31746  31744
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

CARTESIAN = ("x", "y", "z", "roll", "pitch", "yaw")
GROUPS = ("position", "rotation", "gripper")


@dataclass(frozen=True)
class ActionCodes:
    """The bins of one component (Kim et al. 2024, the tokenizer of OpenVLA).

    `bins` edges divide [-1, 1] evenly; a value gets the number d = 1 .. bins of the edges that do
    not lie above it, and the id `vocabulary` - d. Decoding gives the middle between two edges, so
    that a value comes back within 1 / (bins - 1); the two smallest ids decode to the same one.

    Raises ValueError for fewer than 2 bins, or more than there are tokens.
    """

    vocabulary: int  # tokens of the text model, padding of its table left out
    bins: int = 256

    def __post_init__(self) -> None:
        if not 2 <= self.bins <= self.vocabulary:
            raise ValueError(
                f"{self.bins} bins in a vocabulary of {self.vocabulary}; give 2 or more bins, and "
                "a token for each"
            )

    @property
    def first(self) -> int:
        """The smallest id of an action."""
        return self.vocabulary - self.bins

    @cached_property
    def edges(self) -> Tensor:  # (bins,) float64
        return torch.linspace(-1, 1, self.bins, dtype=torch.float64)

    @cached_property
    def centers(self) -> Tensor:  # (bins - 1,) float64
        return (self.edges[:-1] + self.edges[1:]) / 2

    def encode(self, values: Tensor) -> Tensor:  # (...) -> (...) int64
        """Ids of values; those outside [-1, 1] count as its ends."""
        clipped = values.double().clamp(-1, 1).contiguous()
        return self.vocabulary - torch.bucketize(clipped, self.edges.to(values.device), right=True)

    def decode(self, ids: Tensor) -> Tensor:  # (...) -> (...) float64
        """Values in (-1, 1); an id that is no action counts as the nearest one that is."""
        index = (self.vocabulary - ids - 1).clamp(0, self.bins - 2)
        return self.centers.to(ids.device)[index]

    def contains(self, ids: Tensor) -> Tensor:  # (...) -> (...) bool
        """Which ids are actions: padding, an end of sequence and words are not."""
        return (ids >= self.first) & (ids < self.vocabulary)


@dataclass(frozen=True)
class ActionDim:
    """One component of an action."""

    name: str
    group: str  # "position", "rotation", "gripper", or "motion" where nothing more is known
    low: float = -1.0  # what -1 stands for, in the robot's units; where `is_scaled`
    high: float = 1.0  # what 1 stands for
    is_scaled: bool = True  # otherwise the robot gets the value as it is
    is_strict: bool = False  # whether no tolerance applies to it


@dataclass(frozen=True)
class ActionSpace:
    """What the tokens of one answer mean to a robot.

    An answer of several actions (a chunk) repeats the components. *Normalised* values lie in
    [-1, 1]; a component that is not scaled is the same in both units.
    """

    dims: tuple[ActionDim, ...]
    codes: ActionCodes

    def __post_init__(self) -> None:
        if not self.dims:
            raise ValueError("an action of no components; give one ActionDim for each")

    @classmethod
    def of(cls, statistics: Mapping[str, Any], codes: ActionCodes) -> ActionSpace:
        """From `norm_stats[key]["action"]`: q01, q99, and a mask of what they scale.

        Of 7 components the first three are a position, then come a rotation and a gripper; of any
        other number the last is a gripper where the mask leaves it out. Grippers are strict.

        Raises ValueError for statistics that are missing, of different lengths, or no bounds.
        """
        missing = [name for name in ("q01", "q99") if name not in statistics]
        if missing:
            raise ValueError(
                f"action statistics without {' and '.join(missing)} have "
                f"{', '.join(statistics) or 'nothing'}; give the entry of norm_stats that the "
                "policy was trained with"
            )
        low, high = ([float(one) for one in statistics[name]] for name in ("q01", "q99"))
        mask = [bool(one) for one in statistics.get("mask", [True] * len(low))]
        if not len(low) == len(high) == len(mask):
            raise ValueError(
                f"q01, q99 and mask have {len(low)}, {len(high)} and {len(mask)} entries; give one "
                "for each component"
            )
        wrong = [at for at, pair in enumerate(zip(low, high, strict=True)) if not _bounds(*pair)]
        if wrong:
            at = wrong[0]
            raise ValueError(
                f"component {at} lies between q01={low[at]} and q99={high[at]}; give finite "
                "bounds, the lower one first"
            )
        groups = _groups(mask)
        names = _names(groups)
        rows = zip(names, groups, low, high, mask, strict=True)
        return cls(tuple(ActionDim(*row, is_strict=row[1] == "gripper") for row in rows), codes)

    @classmethod
    def keyed(
        cls, norm_stats: Mapping[str, Any], key: str | None, codes: ActionCodes
    ) -> ActionSpace:
        """By the name of a data set in a configuration; without one, the only one there is.

        Raises ValueError for a name that is missing, or not known.
        """
        known = ", ".join(norm_stats) or "none"
        if key is None and len(norm_stats) != 1:
            raise ValueError(
                f"this policy has action statistics of {len(norm_stats)} data sets; give "
                f"unnorm_key=, one of {known}"
            )
        name = next(iter(norm_stats)) if key is None else key
        if name not in norm_stats:
            raise ValueError(
                f"unnorm_key={name!r}: this policy has no action statistics of that name; give one "
                f"of {known}"
            )
        return cls.of(norm_stats[name]["action"], codes)

    @property
    def size(self) -> int:
        """D, the components of one action."""
        return len(self.dims)

    @property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """The components of each group, in the order they are said."""
        found: dict[str, tuple[int, ...]] = {}
        for at, dim in enumerate(self.dims):
            found[dim.group] = (*found.get(dim.group, ()), at)
        return found

    @cached_property
    def bin_size(self) -> Tensor:  # (D,) float64, in the robot's units
        """What one bin is worth: components that differ by r bins differ by r times this."""
        return self._half_range * (2 / (self.codes.bins - 1))

    @cached_property
    def is_strict(self) -> Tensor:  # (D,) bool
        return torch.tensor([dim.is_strict for dim in self.dims])

    @cached_property
    def _half_range(self) -> Tensor:  # (D,) float64
        half = [(dim.high - dim.low) / 2 if dim.is_scaled else 1.0 for dim in self.dims]
        return torch.tensor(half, dtype=torch.float64)

    @cached_property
    def _middle(self) -> Tensor:  # (D,) float64
        middle = [(dim.high + dim.low) / 2 if dim.is_scaled else 0.0 for dim in self.dims]
        return torch.tensor(middle, dtype=torch.float64)

    def unnormalise(self, values: Tensor) -> Tensor:  # (..., D) -> (..., D) float64
        """Normalised values in the robot's units."""
        return values.double() * self._half_range.to(values.device) + self._middle.to(values.device)

    def normalise(self, actions: Tensor) -> Tensor:  # (..., D) -> (..., D) float64
        """The robot's units in [-1, 1], clipped; a component that never changes is 0."""
        half, middle = self._half_range.to(actions.device), self._middle.to(actions.device)
        values = (actions.double() - middle) / torch.where(half > 0, half, torch.inf)
        return values.clamp(-1, 1)

    def tokens(self, values: Tensor) -> Tensor:  # (..., D) normalised -> (..., D) int64
        """The ids of an action."""
        return self.codes.encode(values)

    def values(self, tokens: Tensor) -> Tensor:  # (..., D) -> (..., D) float64, normalised
        """The action that ids stand for."""
        return self.codes.decode(tokens)

    def is_open(self, values: Tensor) -> Tensor:  # (..., D) normalised -> (...) bool
        """Whether the gripper is told to open: half of its way and more.

        Raises ValueError where there is none.
        """
        at = self.groups.get("gripper", ())
        if len(at) != 1:
            raise ValueError(f"an action of {self.size} components has {len(at)} grippers, not one")
        dim = self.dims[at[0]]
        half = 0.0 if dim.is_scaled else 0.5  # OpenVLA keeps grippers in [0, 1], and so binned
        return values[..., at[0]] >= half

    def dims_at(self, said: Sequence[int], places: Tensor) -> Tensor:  # (1 or B, N) -> (B, N)
        """Which component each drafted token is: behind the `said` tokens of a row, `places` on.

        A token hangs from the context at place 0. The only rule of indices; chunks go round.
        """
        before = torch.tensor(said, device=places.device)[:, None]
        return (before + places) % self.size

    def with_strict(self, strict: Sequence[int]) -> ActionSpace:
        """The same space with these components strict, and no others.

        Raises ValueError for a component that there is not.
        """
        unknown = sorted(set(strict) - set(range(self.size)))
        if unknown:
            raise ValueError(
                f"strict component {unknown[0]} of an action of {self.size}; give numbers from 0 "
                f"to {self.size - 1}"
            )
        rows = enumerate(self.dims)
        return replace(self, dims=tuple(replace(dim, is_strict=at in strict) for at, dim in rows))


def _bounds(low: float, high: float) -> bool:
    return float("-inf") < low <= high < float("inf")


def _groups(mask: Sequence[bool]) -> list[str]:
    """The group of each component."""
    grips = len(mask) == len(CARTESIAN) + 1 or (bool(mask) and not mask[-1])
    moving = len(mask) - grips
    is_cartesian = moving in (3, 6)
    groups = [GROUPS[at // 3] if is_cartesian else "motion" for at in range(moving)]
    return groups + ["gripper"] * grips


def _names(groups: Sequence[str]) -> list[str]:
    cartesian = "motion" not in groups
    return [
        "gripper" if group == "gripper" else CARTESIAN[at] if cartesian else f"a{at}"
        for at, group in enumerate(groups)
    ]
