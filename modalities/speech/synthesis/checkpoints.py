"""Load the bundled codec language models.

The folder of a target holds a Llama, its tokenizer and, in `codec`, the codec. Its configuration
defines the ids of codes in "speech_codes": see
`mmspec.modalities.speech.synthesis.layout.SpeechCodes`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mmspec.drafters.neural.multi_token import SEES
from mmspec.modality import Entry
from mmspec.models.heads.multi_token import load_multi_token_heads
from mmspec.zoo.catalogue import load_folder, load_processor, path


def load(entry: Entry, folder: Path, dtype: torch.dtype | None = None) -> Any:
    """A codec language model, or the multi-token heads of one."""
    if entry.sees != SEES:
        return load_folder(folder, sees=False, dtype=dtype)
    heads: Any = load_multi_token_heads(folder)
    return heads.to(dtype or torch.float32)


def processor(entry: Entry, folder: Path) -> Any:
    """The tokenizer of a model; for heads, that of their target."""
    if entry.sees != SEES:
        return load_processor(folder, sees=False)
    assert entry.target is not None
    return load_processor(path(entry.target), sees=False)
