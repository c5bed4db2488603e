"""What a trace of a policy shows: its actions in real time, and the bins of their components."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from mmspec.codes.actions import ActionSpace
from mmspec.modalities.vla.rollout import Rollout
from mmspec.tracing.media import image_uri

MOST_FRAMES, SIDE = 24, 128  # camera images of an episode, and their pixels


def find_processor(formatter: Any) -> Any:
    """None: its tokens are bins of actions."""
    return None


def depict(session: Any, output: Any, trace: Any) -> dict[str, Any]:
    """The view `actions` of predicted actions; nothing for text."""
    if trace.about["call"] in ("generate", "__call__"):
        return {}
    policy = session.binder.bind_default()
    space: ActionSpace = policy.space
    codes, ids = space.codes, {code for row in trace.list_tokens() for code in row}
    ids |= {code for one in trace.rounds for row in one["rows"] for code in row["draft"]}
    view = {
        "components": [dim.name for dim in space.dims],
        "bins": codes.bins,
        "bin": {str(code): codes.vocabulary - code - 1 for code in ids if code >= codes.first},
        "tolerance": _list_tolerances(session.recipe.options, space),
        "frames": _list_frames(output),
        "note": "",
    }
    if isinstance(output, Rollout):
        end = "reached" if output.is_success else "did not reach"
        view["note"] = f"The robot {end} its goal."
        trace.about["prompt"] = output.instructions[:1]
    return {"actions": view}


def _list_tolerances(options: Mapping[str, Any], space: ActionSpace) -> list[float] | None:
    """The tolerance of every component in bins; None for recipes without such a one."""
    radius = options.get("radius")
    if radius is None or options.get("radii") is not None or options.get("metric") != "bins":
        return None
    strict = options.get("strict")
    named = {dim.name for dim in space.dims if dim.is_strict} if strict is None else {*strict}
    return [0 if dim.name in named else radius for dim in space.dims]


def _list_frames(output: Any) -> list[str]:
    """Camera images of an episode, evenly spread."""
    if not isinstance(output, Rollout):
        return []
    images: Sequence[Any] = output.images
    count = min(MOST_FRAMES, len(images))
    places = [round(at * (len(images) - 1) / max(count - 1, 1)) for at in range(count)]
    return [image_uri(Image.fromarray(images[at]), SIDE) for at in places]
