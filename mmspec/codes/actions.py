"""Tokens of robot actions: ids, bins, and the values they decode to.

An action has D components, one token each in a fixed order. The last `bins` ids of the vocabulary
encode them, larger values with smaller ids (RT-2, OpenVLA). For a vocabulary of 32000 and 256 bins:

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

from mmspec.errors import is_integer

CARTESIAN = ("x", "y", "z", "roll", "pitch", "yaw")
GROUPS = ("position", "rotation", "gripper")


@dataclass(frozen=True)
class ActionCodes:
    """The bins of one component (Kim et al. 2024, the tokenizer of OpenVLA).

    `bins` edges divide [-1, 1] evenly. A value has the number d = 1 .. bins of the edges at or
    below it, and the id `vocabulary` - d. Decoding returns the middle between two edges, so the
    error is at most 1 / (bins - 1); the two smallest ids decode to the same value.

    Raises ValueError for fewer than 2 bins, or more bins than tokens.
    """

    vocabulary: int  # tokens of the text model, without padding of its embedding table
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
        """Ids of values; values outside [-1, 1] are clipped."""
        clipped = values.double().clamp(-1, 1).contiguous()
        return self.vocabulary - torch.bucketize(clipped, self.edges.to(values.device), right=True)

    def decode(self, ids: Tensor) -> Tensor:  # (...) -> (...) float64
        """Values in (-1, 1); other ids decode as the nearest action id."""
        index = (self.vocabulary - ids - 1).clamp(0, self.bins - 2)
        return self.centers.to(ids.device)[index]

    def contains(self, ids: Tensor) -> Tensor:  # (...) -> (...) bool
        """Whether ids are actions; padding, end of sequence and text are not."""
        return (ids >= self.first) & (ids < self.vocabulary)


@dataclass(frozen=True)
class ActionDim:
    """One component of an action."""

    name: str
    group: str  # "position", "rotation", "gripper", or "motion" if unknown
    low: float = -1.0  # value of -1 in the robot's units, if `is_scaled`
    high: float = 1.0  # value of 1
    is_scaled: bool = True  # otherwise the value is used unchanged
    is_strict: bool = False  # whether no tolerance applies to it


@dataclass(frozen=True)
class ActionSpace:
    """The meaning of the action tokens of one output.

    An output of several actions (a chunk) repeats the components. *Normalised* values lie in [-1,
    1]; a component that is not scaled is the same in both units.
    """

    dims: tuple[ActionDim, ...]
    codes: ActionCodes

    def __post_init__(self) -> None:
        if not self.dims:
            raise ValueError("an action of no components; give one ActionDim for each")

    @classmethod
    def from_statistics(cls, statistics: Mapping[str, Any], codes: ActionCodes) -> ActionSpace:
        """From `norm_stats[key]["action"]`: q01, q99, and a mask of the scaled components.

        Of 7 components the first three are a position, then come a rotation and a gripper;
        otherwise the last component is a gripper if the mask excludes it. Grippers are strict.

        Raises ValueError for statistics that are missing, of different lengths, or invalid bounds.
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
    def from_norm_stats(
        cls, norm_stats: Mapping[str, Any], key: str | None, codes: ActionCodes
    ) -> ActionSpace:
        """By data set name in a configuration; without a name, the only one there is.

        Raises ValueError for a missing or unknown name.
        """
        known = ", ".join(norm_stats) or "none"
        if key is None and len(norm_stats) != 1:
            raise ValueError(
                f"this policy has action statistics of {len(norm_stats)} data sets; give "
                f"unnorm_key=, one of {known}"
            )
        name = next(iter(norm_stats)) if key is None else key
        if not isinstance(name, str) or name not in norm_stats:
            raise ValueError(
                f"unnorm_key={name!r}: this policy has no action statistics of that name; give one "
                f"of {known}"
            )
        return cls.from_statistics(norm_stats[name]["action"], codes)

    @property
    def size(self) -> int:
        """D, the components of one action."""
        return len(self.dims)

    @property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """The components of each group, in order."""
        found: dict[str, tuple[int, ...]] = {}
        for at, dim in enumerate(self.dims):
            found[dim.group] = (*found.get(dim.group, ()), at)
        return found

    @cached_property
    def bin_size(self) -> Tensor:  # (D,) float64, in the robot's units
        """The width of one bin: components that differ by r bins differ by r times this."""
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
        """Convert normalised values to the robot's units."""
        return values.double() * self._half_range.to(values.device) + self._middle.to(values.device)

    def normalise(self, actions: Tensor) -> Tensor:  # (..., D) -> (..., D) float64
        """Convert the robot's units to [-1, 1], clipped; a constant component is 0."""
        half, middle = self._half_range.to(actions.device), self._middle.to(actions.device)
        values = (actions.double() - middle) / torch.where(half > 0, half, torch.inf)
        return values.clamp(-1, 1)

    def encode(self, values: Tensor) -> Tensor:  # (..., D) normalised -> (..., D) int64
        """The ids of an action."""
        return self.codes.encode(values)

    def decode(self, tokens: Tensor) -> Tensor:  # (..., D) -> (..., D) float64, normalised
        """The action of ids."""
        return self.codes.decode(tokens)

    def is_open(self, values: Tensor) -> Tensor:  # (..., D) normalised -> (...) bool
        """Whether the gripper is commanded to open: at least halfway.

        Raises ValueError unless there is exactly one gripper.
        """
        at = self.groups.get("gripper", ())
        if len(at) != 1:
            raise ValueError(f"an action of {self.size} components has {len(at)} grippers, not one")
        dim = self.dims[at[0]]
        half = 0.0 if dim.is_scaled else 0.5  # OpenVLA keeps grippers in [0, 1], also when binned
        return values[..., at[0]] >= half

    def dims_at(
        self, generated: Sequence[int], positions: Tensor
    ) -> Tensor:  # (1 or B, N) -> (B, N)
        """The component of each drafted token, given the `generated` tokens of a row.

        `positions` count from 0, directly after the context. Chunks repeat the components.
        """
        offset = torch.tensor(generated, device=positions.device)[:, None]
        return (offset + positions) % self.size

    def with_strict(self, strict: Sequence[int]) -> ActionSpace:
        """The same space with exactly these components strict.

        Raises ValueError for a component that does not exist.
        """
        is_list = isinstance(strict, Sequence) and not isinstance(strict, str | bytes)
        if not is_list or not all(is_integer(one) for one in strict):
            raise ValueError(
                f"strict={strict!r} is not a list of components; give numbers from 0 to "
                f"{self.size - 1}, such as [6]"
            )
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
