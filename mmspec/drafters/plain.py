"""No drafter: plain decoding."""

from __future__ import annotations

from typing import ClassVar

from mmspec.draft import Draft, Drafter, Kind
from mmspec.recipe import Kit
from mmspec.targets.tokens.context import Context


class NoDraft(Drafter):
    """Propose nothing: every round is one plain decoding step."""

    kinds: ClassVar[tuple[Kind, ...]] = tuple(Kind)

    def propose(self, context: Context, state: None) -> Draft:
        return context.empty_draft()


def no_drafter(kit: Kit) -> Drafter:
    """No draft."""
    return NoDraft()
