"""Read a model of ours from a folder, and nothing else that may lie there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mmspec.errors import reading
from mmspec.models.folder import check_there
from mmspec.models.loading import check_folder


def read(maker: Any, folder: str | Path, kind: str, dtype: torch.dtype | None = None) -> Any:
    """The model in eval mode, as it was saved or in `dtype`.

    `kind` is what people call it. Raises ValueError where the folder holds another kind of model.
    """
    check_there(str(folder), kind)
    check_folder(Path(folder))
    with reading(folder, kind):
        model, found = maker.from_pretrained(
            folder, dtype=dtype or "auto", use_safetensors=True, output_loading_info=True
        )
    wrong = sorted({*found["missing_keys"], *found["unexpected_keys"]})
    if wrong:
        raise ValueError(
            f"{folder} is no {kind}: {', '.join(wrong[:3])} is missing or has no place; give a "
            f"folder written by {maker.__name__}.save_pretrained"
        )
    return model.train(False)
