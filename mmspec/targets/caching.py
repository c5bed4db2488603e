"""Whether a model can keep what it has read, so that a rejected draft is rolled back."""

from __future__ import annotations

from typing import Any

from mmspec import _hf


def takes_cache(model: Any) -> None:
    """Refuse a model without a cache by name: what it read cannot be rolled back.

    A wrapper that names no argument at all is left to the first request. Raises ValueError.
    """
    names = _hf.forward_names(model)
    if "input_ids" in names and _hf.cache_name(model) not in names:
        raise ValueError(
            f"{type(model).__name__} takes no past_key_values, so what it has read cannot be "
            "rolled back behind a rejected draft; use model.generate() for this model"
        )


def keeps_cache(model: Any) -> None:
    """Refuse a model that keeps nothing of what it reads while it learns. Raises ValueError."""
    inner = _hf.uncompiled(model)
    if inner.training and getattr(inner, "is_gradient_checkpointing", False):
        raise ValueError(
            f"{type(inner).__name__} is in training with gradient checkpointing, which keeps no "
            "keys and values; call model.eval() before generating"
        )
