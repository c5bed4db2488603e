"""mmspec: speculative decoding for multimodal Hugging Face models.

    import mmspec

    fast = mmspec.accelerate(model, recipe="prompt-lookup")
    out = fast.generate(**inputs, max_new_tokens=128)
    out.sequences, out.stats

Names are loaded when first used, so that `import mmspec` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmspec import _renamed
from mmspec._attributes import attach_lazily

if TYPE_CHECKING:
    from mmspec import compressors, drafters, modalities, recipes, verifiers, zoo
    from mmspec.accelerated import Accelerated
    from mmspec.api import accelerate, decode_plain, load
    from mmspec.distributions.call_state import StatefulProcessor
    from mmspec.distributions.grammar import Grammar
    from mmspec.modalities.common.text_generation import Output
    from mmspec.recipe import Recipe
    from mmspec.serving.engine import Engine
    from mmspec.stats import Stats
    from mmspec.tracing.trace import Trace

__version__ = "0.1.0"

__all__ = [
    "Accelerated",
    "Engine",
    "Grammar",
    "Output",
    "Recipe",
    "StatefulProcessor",
    "Stats",
    "Trace",
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
    "Accelerated": "mmspec.accelerated",
    "Engine": "mmspec.serving.engine",
    "Grammar": "mmspec.distributions.grammar",
    "Output": "mmspec.modalities.common.text_generation",
    "Recipe": "mmspec.recipe",
    "StatefulProcessor": "mmspec.distributions.call_state",
    "Stats": "mmspec.stats",
    "Trace": "mmspec.tracing.trace",
    "accelerate": "mmspec.api",
    "decode_plain": "mmspec.api",
    "load": "mmspec.api",
}

_renamed.install()

if not TYPE_CHECKING:  # a type checker reads the imports above, and so sees misspelt names
    _FOLDERS = {name: f"mmspec.{name}" for name in __all__ if name not in _HOMES}
    __getattr__, __dir__ = attach_lazily(__name__, {**_HOMES, **_FOLDERS})
