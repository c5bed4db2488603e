"""Published settings of forecasts, per model: `accelerate(pipe, "speca", **SPECA["flux"])`.

SpeCa: the authors' code (Cache4Diffusion), where a rejected step is kept, the batch is judged as
one, and thresholds are of the element-wise relative error. TaylorSeer: its code for DiT (interval
4, order 4) and for FLUX (interval 6; orders 1 and 2 are both in use); the settings for HunyuanVideo
are shared by its ports to Wan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_AS_RELEASED = {"metric": "relative-l1", "rollback": False, "per_sample": False}

TAYLORSEER: Mapping[str, Mapping[str, Any]] = {
    "dit": {"order": 4, "interval": 4, "warm_up": 3},
    "flux": {"order": 2, "interval": 6, "warm_up": 3},
    "hunyuan-video": {"order": 1, "interval": 5, "warm_up": 1},
}

_COLUMNS = ("order", "base", "decay", "floor", "least", "most", "warm_up")
SPECA: Mapping[str, Mapping[str, Any]] = {
    model: {**dict(zip(_COLUMNS, row, strict=True)), **_AS_RELEASED}
    for model, row in {
        "dit": (4, 0.1, 0.01, 0.01, 2, 5, 3),
        "flux": (2, 7.0, 0.3, 0.1, 2, 8, 3),
        "hunyuan-video": (1, 1.0, 0.1, 0.1, 4, 12, 1),
    }.items()
}
