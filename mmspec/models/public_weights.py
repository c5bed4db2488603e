"""Public checkpoints under this package's names: a table of names, and checks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from torch import Tensor

Names = tuple[tuple[str, str], ...]  # ours, a pattern -> theirs


def names(table: str) -> Names:
    """A table of two columns, ours and theirs."""
    rows = (line.split() for line in table.strip().split("\n"))
    return tuple((ours, theirs) for ours, theirs in rows)


def public_name(name: str, names: Names) -> str:
    """The public name of one of a model's weights, by the first pattern that fits its begin."""
    for ours, theirs in names:
        renamed, count = re.subn(f"^{ours}", theirs, name)
        if count:
            return renamed
    raise AssertionError(f"{name} has no public name")


def taken(
    own: Mapping[str, Tensor],
    public: Mapping[str, Tensor],
    theirs: Callable[[str], str],
    part: Callable[[str, Tensor], Tensor] = lambda _, value: value,
) -> dict[str, Tensor]:
    """Public weights under the names of a model's `own`; others stay out.

    `part` is what a weight takes of the public one. Raises ValueError for what is missing or of
    another shape.
    """
    lacking = sorted({theirs(name) for name in own} - set(public))
    if lacking:
        raise ValueError(f"the public weights lack {', '.join(lacking[:5])}")
    ours = {name: part(name, public[theirs(name)]) for name in own}
    for name, value in ours.items():
        if value.shape != own[name].shape:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)} in the public weights, but the "
                f"configuration asks for {tuple(own[name].shape)}"
            )
    return ours
