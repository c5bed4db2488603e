"""Rename weights of public checkpoints to this package's names, by tables of patterns."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from torch import Tensor

Names = tuple[tuple[str, str], ...]  # ours, a pattern -> theirs


def parse_names(table: str) -> Names:
    """Parse a table of two columns: own pattern, public name."""
    rows = (line.split() for line in table.strip().split("\n"))
    return tuple((ours, theirs) for ours, theirs in rows)


def public_name(name: str, parse_names: Names) -> str:
    """Return the public name of a weight, by the first pattern that matches its beginning."""
    for ours, theirs in parse_names:
        renamed, count = re.subn(f"^{ours}", theirs, name)
        if count:
            return renamed
    raise AssertionError(f"{name} has no public name")


def map_public_weights(
    own: Mapping[str, Tensor],
    public: Mapping[str, Tensor],
    theirs: Callable[[str], str],
    part: Callable[[str, Tensor], Tensor] = lambda _, value: value,
) -> dict[str, Tensor]:
    """Rename public weights to the names in `own`; drop others.

    `part` extracts a weight from the public one. Raises ValueError for missing weights and other
    shapes.
    """
    missing = sorted({theirs(name) for name in own} - set(public))
    if missing:
        raise ValueError(f"the public weights lack {', '.join(missing[:5])}")
    ours = {name: part(name, public[theirs(name)]) for name in own}
    for name, value in ours.items():
        if value.shape != own[name].shape:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)} in the public weights, but the "
                f"configuration asks for {tuple(own[name].shape)}"
            )
    return ours
