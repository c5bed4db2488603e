"""No drafter at all."""

from __future__ import annotations

from typing import ClassVar

from mmspec.draft import Draft, Drafter, Kind
from mmspec.recipe import Kit
from mmspec.targets.tokens.context import Context


class Silent(Drafter):
    """Proposes nothing: every round is one plain decoding step."""

    kinds: ClassVar[tuple[Kind, ...]] = tuple(Kind)

    def propose(self, context: Context, state: None) -> Draft:
        return context.nothing()


def no_drafter(kit: Kit) -> Drafter:
    """Nothing is drafted."""
    return Silent()
