"""Folders of targets under the weight names of an engine: values and other files are copied.

Files are renamed one at a time, so the memory of one shard is enough for a target of any size.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from mmspec import formats
from mmspec.models.folder import find_weight_files, read_json, read_shapes

Renames = Sequence[tuple[str, str]]  # pattern of a name's beginning -> replacement
COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken")  # of tokenizer, processor, settings
INDEX = "model.safetensors.index.json"


def export_target(name: str, source: Path, folder: Path) -> dict[str, str]:
    """Write the folder `source` of a target for an engine; return new weight names by old ones.

    Raises ValueError for formats without targets, and for architectures that the format does not
    list: an engine may want names that are not known here.
    """
    layout = formats.get(name)
    if not layout.targets:
        able = [one for one in formats.names() if formats.get(one).targets]
        raise ValueError(f"format {name} holds heads only; choose --format {', '.join(able)}")
    files = find_weight_files(source)
    read_shapes(source)  # refuses files that are cut off
    content = read_json(source / "config.json")
    rules = layout.targets[_find_kind(content, layout.targets, name)]
    folder.mkdir(parents=True, exist_ok=True)
    renamed: dict[str, str] = {}
    where: dict[str, str] = {}
    for file in files:
        own = _rename_file(file, folder / file.name, rules)
        renamed |= own
        where |= dict.fromkeys(own.values(), file.name)
    for file in sorted(source.iterdir()):
        if file.suffix in COPIED and not file.name.endswith(".index.json"):
            shutil.copyfile(file, folder / file.name)
    if len(files) > 1:
        _write_index(folder, where)
    return renamed


def _find_kind(content: Mapping[str, Any], known: Mapping[str, Renames], name: str) -> str:
    """Return the key of an architecture in `known`. Raises ValueError where it has none.

    A key is a model type, with that of its vision tower where the engine's names depend on it.
    """
    kind, text = content.get("model_type"), content.get("text_config") or {}
    tower = (content.get("vision_config") or {}).get("model_type")
    found = next((one for one in (kind, f"{kind} with {tower}") if one in known), None)
    if found is None:
        described = f"{kind} with {tower}" if tower else f"{kind}"
        raise ValueError(
            f"the weight names of {described} in {name} are not known; known are "
            f"{', '.join(known)}; if the engine reads the folder as it is, serve that"
        )
    inner = text.get("model_type")
    if found != kind and inner not in known:
        raise ValueError(
            f"{kind} with a text model {inner} is not known in {name}; known text models are "
            f"{', '.join(one for one in known if ' ' not in one)}"
        )
    if not content.get("architectures"):
        raise ValueError(
            "config.json lists no architectures, by which engines select a class; save the model "
            "with save_pretrained again"
        )
    return found


def _rename_file(file: Path, out: Path, rules: Renames) -> dict[str, str]:
    """Write a file of weights under other names; return new names by old ones."""
    with safe_open(file, "pt") as stored:
        renamed = {one: _rename(one, rules) for one in stored.keys()}  # noqa: SIM118
        if all(old == new for old, new in renamed.items()):
            shutil.copyfile(file, out)
        else:
            tensors = {new: stored.get_tensor(old) for old, new in renamed.items()}
            save_file(tensors, out, stored.metadata() or {"format": "pt"})
    return renamed


def _rename(name: str, rules: Renames) -> str:
    for pattern, new in rules:
        renamed, count = re.subn(f"^(?:{pattern})", new, name)
        if count:
            return renamed
    return name


def _write_index(folder: Path, where: Mapping[str, str]) -> None:
    size = sum((folder / name).stat().st_size for name in set(where.values()))
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))})
    (folder / INDEX).write_text(f"{text}\n", encoding="utf-8")
