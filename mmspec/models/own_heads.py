"""Find draft heads in the checkpoints of targets, by the names of their weights."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file

from mmspec.models.folder import read_json, read_shapes

LAYER = "layers.0."  # prefix of the decoder layer in a `NativeMtpHead`
_QWEN = {
    r"(?:model\.)?mtp\.pre_fc_norm_embedding\.": "enorm.",
    r"(?:model\.)?mtp\.pre_fc_norm_hidden\.": "hnorm.",
    r"(?:model\.)?mtp\.fc\.": "eh_proj.",
    r"(?:model\.)?mtp\.norm\.": "norm.",
    r"(?:model\.)?mtp\.layers\.0\.": LAYER,
}
_WHOLE = ("model.safetensors.index.json", "model.safetensors")


def find_weights(source: Any) -> dict[str, str]:
    """Names in a checkpoint of the weights of its head, mapped to the head's names.

    `source` is a model of transformers, or the folder or hub name that one is loaded from. Empty
    where there is no head; no tensor is read, and nothing is downloaded.
    """
    folder = find_folder(source)
    if folder is None or not (folder / "config.json").is_file():
        return {}
    with suppress(ValueError):  # files that changed after the model was loaded
        content, shapes = read_json(folder / "config.json"), read_shapes(folder)
        count = (content.get("text_config") or content).get("num_hidden_layers")
        renamed = {name: _rename(name, count) for name in shapes}
        found = {name: own for name, own in renamed.items() if own is not None}
        return found if "eh_proj.weight" in found.values() else {}
    return {}


def find_folder(source: Any) -> Path | None:
    """The folder of a checkpoint; of a hub name, that of the local copy."""
    if not isinstance(source, str | Path):
        source = getattr(getattr(source, "config", None), "_name_or_path", None)
    if not source:
        return None
    if Path(source).is_dir():
        return Path(source) if any(Path(source).glob("*.safetensors")) else None
    for name in _WHOLE:
        with suppress(OSError, ValueError):  # not in the cache, or no hub name
            file = cached_file(str(source), name, local_files_only=True)
            return None if file is None else Path(file).parent
    return None


def _rename(name: str, count: Any) -> str | None:
    """The head's name of a checkpoint's weight; None for weights that are not the head's."""
    root = rf"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.{count}\."
    deepseek = {
        rf"{root}shared_head\.norm\.": "norm.",
        rf"{root}(?=(?:enorm|hnorm|eh_proj)\.)": "",
        rf"{root}(?!shared_head\.head|embed_tokens)": LAYER,
    }
    for pattern, own in {**_QWEN, **deepseek}.items():
        match = re.match(pattern, name)
        if match is not None:
            return own + name[match.end() :]
    return None
