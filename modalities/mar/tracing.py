"""What a trace of MAR shows: the picture by the round of its cells."""

from __future__ import annotations

from typing import Any

from mmspec.targets.continuous.patches import draw_order
from mmspec.tracing.media import image_uri


def find_processor(formatter: Any) -> Any:
    """None: its tokens are patches."""
    return None


def depict(session: Any, output: Any, trace: Any) -> dict[str, Any]:
    """The view `picture`, of images that were decoded."""
    if output.images is None:
        return {}
    request, config = trace.call.request, session.model.config
    spans, order = request.plan.spans(config.cells), draw_order(request.noise, config.cells)
    rows = []
    for turns, image in zip(order.tolist(), output.images, strict=True):
        cells = [0] * config.cells
        for step, (begin, end) in enumerate(spans):
            for cell in turns[begin:end]:
                cells[cell] = step
        grid = [config.side, config.side]
        rows.append({"image": image_uri(image), "grid": grid, "cells": cells, "patches": {}})
    return {"picture": {"rows": rows, "note": "A token is all cells of a step."}}
