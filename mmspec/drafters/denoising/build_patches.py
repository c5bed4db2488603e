"""Draft architectures of recipes that decode continuous tokens: from a kit to a drafter."""

from __future__ import annotations

from mmspec.draft import Drafter
from mmspec.drafters.denoising.patches import Ahead, Aligned, Milestones
from mmspec.drafters.growth import Chain
from mmspec.drafters.length import Fixed
from mmspec.recipe import Kit


def aligned_model(kit: Kit) -> Drafter:
    """A small image model on the target's noise, so many steps at a time."""
    assert kit.drafter is not None
    return Aligned(kit.drafter.reader, Ahead(_length(kit), kit.options["prefill"]))


def aligned_to_milestones(kit: Kit) -> Drafter:
    """The same, verified where the step is a multiple of the length."""
    assert kit.drafter is not None
    return Aligned(kit.drafter.reader, Milestones(_length(kit), kit.options["prefill"]))


def _length(kit: Kit) -> int:
    if not (isinstance(kit.shape, Chain) and isinstance(kit.shape.length, Fixed)):
        raise ValueError(
            f"continuous tokens are drafted so many steps at a time, not as {kit.shape!r}; give "
            "length= a number"
        )
    return kit.shape.length.most
