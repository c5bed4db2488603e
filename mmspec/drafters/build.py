"""Draft architectures as recipes name them: from a kit of parts to a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmspec.compressors.average_pool import AveragePool
from mmspec.compressors.contract import Compressor, check_needs
from mmspec.draft import Drafter
from mmspec.drafters.growth import Chain, DraftModel, StaticTree
from mmspec.drafters.length import Length
from mmspec.drafters.lookup.prompt_lookup import PromptLookup
from mmspec.drafters.lookup.suffix import SuffixAutomaton
from mmspec.drafters.lookup.token_recycling import TokenRecycling
from mmspec.drafters.neural import massv
from mmspec.drafters.neural.ensemble import Ensemble
from mmspec.drafters.neural.feature_head import SEES, FeatureDraft
from mmspec.drafters.neural.shared import SharedBackbone, spread
from mmspec.drafters.neural.sight import (
    CompressedPixels,
    Nothing,
    Pixels,
    Placeholders,
    TargetFeatures,
)
from mmspec.drafters.neural.small_model import Autoregressive, Sight, SmallModel
from mmspec.drafters.neural.weighting import Agreement, Fixed, Weighting
from mmspec.drafters.plain import Silent
from mmspec.modalities.vlm import families as vlm
from mmspec.recipe import Kit
from mmspec.targets.backbone import Backbone

SIGHTS = ("nothing", "placeholders", "prompt", "pixels", "target-features")


def no_drafter(kit: Kit) -> Drafter:
    """Nothing is drafted."""
    return Silent()


def small_model(kit: Kit) -> Drafter:
    """An independent draft model that sees what the recipe says, or a feature head."""
    assert kit.drafter is not None
    if kit.sees == SEES:
        return feature_head(kit)
    return _grown(kit, SmallModel(kit.drafter, sight(kit)))


def _grown(kit: Kit, model: DraftModel) -> Drafter:
    assert kit.drafter is not None
    if not (kit.drafter.can_branch or isinstance(kit.shape, Chain)):
        raise ValueError(
            f"{type(kit.drafter.model).__name__} keeps a recurrent state, so as a draft model it "
            "cannot grow a tree; give length= instead of tree="
        )
    return Autoregressive(model, kit.shape)


def feature_head(kit: Kit) -> Drafter:
    """A head on the target's own states (EAGLE)."""
    assert kit.drafter is not None
    if kit.compressor is not None:
        raise ValueError(
            f"a feature head sees the picture through the target's states, so there is nothing for "
            f"compressor={kit.compressor!r} to thin; drop it"
        )
    head = kit.drafter.to(kit.target.device, kit.target.model.dtype)
    return Autoregressive(FeatureDraft(kit.target, head), kit.shape)


def massv_model(kit: Kit) -> Drafter:
    """A small language model behind the target's vision tower and its own projector (MASSV).

    A draft model with a vision encoder of its own, as wide as the target, needs no projector: it
    reads the target's projected features as they are.
    """
    assert kit.drafter is not None
    if kit.sees != "target-features":
        raise ValueError(f"MASSV sees the target's features, not {kit.sees!r}; drop sees=")
    if kit.options["projector"] is None and kit.drafter.family.media:
        return _grown(kit, SmallModel(kit.drafter, _target_features(kit)))
    projector = massv.projector_of(kit.drafter.model, kit.options["projector"])
    width = vlm.tower_width(kit.target.model)
    source = kit.target.config.hidden_size if width is None else width
    massv.check_widths(projector, source, kit.drafter.config.hidden_size)
    optics = vlm.optics(kit.target, tower=True)
    view = TargetFeatures(optics, _checked(kit.compressor), projector)
    return _grown(kit, SmallModel(kit.drafter, view))


def skipping(kit: Kit) -> Drafter:
    """The target without some layers: those in `skip`, or about `share` of the inner ones."""
    _check_own_memory(kit)
    skip = kit.options["skip"]
    if skip is None:
        skip = spread(len(kit.target.decoder.layers), kit.options["share"])
    return Autoregressive(SharedBackbone(kit.target, tuple(skip)), kit.shape)


def early_exit(kit: Kit) -> Drafter:
    """The first `depth` layers of the target, a quarter of them by default."""
    _check_own_memory(kit)
    depth = kit.options["depth"]
    if depth is None:
        depth = max(len(kit.target.decoder.layers) // 4, 1)
    return Autoregressive(SharedBackbone(kit.target, depth=depth), kit.shape)


def _check_own_memory(kit: Kit) -> None:
    if kit.sees != "target-memory" or kit.compressor is not None:
        raise ValueError(
            "the target drafts for itself here and sees what it has in its memory; drop sees= and "
            "compressor="
        )


def uniform_ensemble(kit: Kit) -> Drafter:
    """Views of one draft model, mixed with fixed weights (IbED)."""
    weights = kit.options["weights"]
    return _ensemble(kit, Fixed(None if weights is None else tuple(weights)))


def tested_ensemble(kit: Kit) -> Drafter:
    """Views of one draft model, mixed with weights chosen while decoding (TABED)."""
    return _ensemble(kit, Agreement(kit.options["steps"], kit.options["window"]))


VIEWS = ("pixels", "nothing", "pooled", "placeholders")


def _ensemble(kit: Kit, weighting: Weighting) -> Drafter:
    if kit.sees != "pixels":
        raise ValueError(
            f"an ensemble chooses its own sights; give views= out of {', '.join(VIEWS)}, not sees="
        )
    views: Sequence[str] = kit.options["views"]
    if isinstance(views, str) or not views or set(views) - set(VIEWS):
        raise ValueError(f"views={views!r} must be a list out of {', '.join(VIEWS)}")
    assert kit.drafter is not None
    sights = tuple(_view(kit, name) for name in views)
    return _grown(kit, Ensemble(kit.drafter, sights, weighting))


def _view(kit: Kit, name: str) -> Sight:
    assert kit.drafter is not None
    if name == "pooled":
        return _pixels(kit.drafter, kit.compressor or AveragePool())
    if name == "pixels":
        return Pixels()
    if name == "placeholders":
        return Placeholders()
    return Nothing(_ignored(kit))


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
    """The sight named by `kit.sees`, through `kit.compressor` if there is one.

    Raises ValueError for an unknown name (listing the known ones), for a compressor of nothing,
    and for features that do not fit the draft model.
    """
    assert kit.drafter is not None
    if kit.sees == "pixels":
        return Pixels() if kit.compressor is None else _pixels(kit.drafter, kit.compressor)
    if kit.sees == "target-features":
        return _target_features(kit)
    if kit.sees in SIGHTS and kit.compressor is not None:
        raise ValueError(
            f"sees={kit.sees!r} shows no picture that compressor={kit.compressor!r} could thin; "
            "give sees='pixels' or sees='target-features'"
        )
    if kit.sees == "nothing":
        return Nothing(_ignored(kit))
    if kit.sees == "placeholders":
        return Placeholders()
    if kit.sees == "prompt":  # as the target has it, guidance included
        return Pixels(name="prompt")
    raise ValueError(f"sees={kit.sees!r} is not known; choose one of {', '.join(SIGHTS)}")


def _pixels(drafter: Backbone, compressor: Any) -> CompressedPixels:
    vlm.check_features(drafter)
    vlm.check_woven(drafter)
    checked = _checked(compressor)
    assert checked is not None
    return CompressedPixels(vlm.optics(drafter), checked)


def _target_features(kit: Kit) -> TargetFeatures:
    assert kit.drafter is not None
    source, own = kit.target.config.hidden_size, kit.drafter.config.hidden_size
    if source != own:
        raise ValueError(
            f"the target's vision features are {source} wide, but the draft model reads {own}; use "
            "a draft model with a projector (recipe='massv'), or sees='pixels'"
        )
    return TargetFeatures(vlm.optics(kit.target), _checked(kit.compressor))


def _checked(compressor: Compressor | None) -> Compressor | None:
    if compressor is not None:
        check_needs(compressor)
    return compressor
