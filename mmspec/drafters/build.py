"""Draft architectures as recipes name them: from a kit of parts to a drafter."""

from __future__ import annotations

from mmspec.draft import Drafter
from mmspec.drafters.grow import Chain, StaticTree
from mmspec.drafters.model import Autoregressive, Sight, SmallModel
from mmspec.drafters.plain import Silent
from mmspec.drafters.prompt_lookup import PromptLookup
from mmspec.drafters.sight import Nothing, Pixels, Placeholders
from mmspec.drafters.suffix import SuffixAutomaton
from mmspec.drafters.token_recycling import TokenRecycling
from mmspec.length import Length
from mmspec.modalities import vlm
from mmspec.recipe import Kit

SIGHTS = ("nothing", "placeholders", "pixels", "target-features")


def no_drafter(kit: Kit) -> Drafter:
    """Nothing is drafted."""
    return Silent()


def small_model(kit: Kit) -> Drafter:
    """An independent draft model that sees what the recipe says."""
    assert kit.drafter is not None
    return Autoregressive(SmallModel(kit.drafter, sight(kit)), kit.shape)


def prompt_lookup(kit: Kit) -> Drafter:
    """Copies of the text so far."""
    return PromptLookup(_length(kit), kit.options["longest"], _ignored(kit))


def suffix_automaton(kit: Kit) -> Drafter:
    """Copies behind the longest repeated suffix."""
    return SuffixAutomaton(_length(kit), kit.options["shortest"], _ignored(kit))


def token_recycling(kit: Kit) -> Drafter:
    """A tree of the target's own runner-up tokens."""
    if not isinstance(kit.shape, StaticTree):
        raise ValueError(
            "token recycling fills a static tree; give tree= branching widths or a Tree"
        )
    return TokenRecycling(tree=kit.shape.tree)


def _length(kit: Kit) -> Length:
    if not isinstance(kit.shape, Chain):
        raise ValueError("copies are chains; give length= instead of tree=")
    return kit.shape.length


def _ignored(kit: Kit) -> tuple[int, ...]:
    return vlm.visual_ids(kit.target.model, kit.target.family)


def sight(kit: Kit) -> Sight:
    """The sight named by `kit.sees`. Raises ValueError listing the known ones."""
    if kit.sees == "nothing":
        return Nothing(vlm.visual_ids(kit.target.model, kit.target.family))
    if kit.sees == "placeholders":
        return Placeholders()
    if kit.sees == "pixels":
        return Pixels()
    raise ValueError(f"sees={kit.sees!r} is not known; choose one of {', '.join(SIGHTS)}")
