"""mmspec: speculative decoding for multimodal Hugging Face models.

    import mmspec

    fast = mmspec.accelerate(model, recipe="prompt-lookup")
    out = fast.generate(**inputs, max_new_tokens=128)
    out.sequences, out.stats

Names are loaded when first used, so that `import mmspec` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmspec import compressors, drafters, modalities, recipes, verifiers, zoo
    from mmspec.api import Accelerated, accelerate, decode_plain, load
    from mmspec.modalities.tokens import Output
    from mmspec.recipe import Recipe
    from mmspec.stats import Stats

__version__ = "0.1.0"

__all__ = [
    "Accelerated",
    "Output",
    "Recipe",
    "Stats",
    "accelerate",
    "compressors",
    "decode_plain",
    "drafters",
    "load",
    "modalities",
    "recipes",
    "verifiers",
    "zoo",
]

_HOMES = {
    "Accelerated": "mmspec.api",
    "Output": "mmspec.modalities.tokens",
    "Recipe": "mmspec.recipe",
    "Stats": "mmspec.stats",
    "accelerate": "mmspec.api",
    "decode_plain": "mmspec.api",
    "load": "mmspec.api",
}


if not TYPE_CHECKING:  # a type checker reads the imports above, and so sees misspelt names

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(import_module(_HOMES[name]), name)
        if name in __all__:
            return import_module(f"mmspec.{name}")
        raise AttributeError(f"module 'mmspec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
