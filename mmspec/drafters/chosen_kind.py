"""Drafters that can draw siblings in several ways."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any

from mmspec.draft import Drafter, Kind


class ChoosesKind(Drafter):
    """A drafter that can draw all of its `choices`, preferred first, until `kind` names one."""

    kind: Kind | None

    @property
    @abstractmethod
    def choices(self) -> tuple[Kind, ...]: ...

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return self.choices if self.kind is None else (self.kind,)

    def drawing(self, kind: Kind) -> Drafter:
        own: Any = self
        drawn: Drafter = replace(own, kind=kind)
        return drawn
