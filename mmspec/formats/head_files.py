"""Shared code of head formats: a folder with config.json and one file of weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmspec.formats import Format
from mmspec.formats.published import check_known, read_weights
from mmspec.models.folder import read_json

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
FILES = ("its folder, or config.json", "[the weights]")
_SHAPE = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rms_norm_eps", "max_position_embeddings", "hidden_act", "vocab_size", "initializer_range"),
)
_NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class PublishedHead:
    """Configuration and weights of a head under the names of a format."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    file: Path = Path("model.safetensors")  # of the weights


def head_format(
    about: str,
    convert: Callable[[Sequence[Path], Mapping[str, Any]], Any],
    export: Callable[[Any, str | None], PublishedHead] | None = None,
    **options: str,
) -> Format:
    """Make a format of heads; `options` map settings that no file holds to descriptions."""
    return Format(about, FILES, convert, options, export)


def open_head(paths: Sequence[Path], names: Sequence[str] = WEIGHTS) -> PublishedHead:
    """Read a folder, or its two files. Raises ValueError for missing files and unsafe pickles."""
    first = paths[0]
    folder = first if first.is_dir() else first.parent
    file = first / "config.json" if first.is_dir() else first
    if not file.is_file():
        raise ValueError(f"there is no {file}; give the folder as it was downloaded")
    there = [folder / name for name in names if (folder / name).is_file()]
    found = paths[1] if len(paths) > 1 else next(iter(there), folder / names[0])
    return PublishedHead(read_json(file), read_weights(found), found)


def read_sizes(config: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return sizes and rotary settings under this package's names.

    Raises ValueError for missing sizes.
    """
    missing = [name for name in _NEEDED if config.get(name) is None]
    if missing:
        raise ValueError(
            f"the configuration of {file} lacks {', '.join(missing)}; copy it again, or give a "
            "head of this layout"
        )
    own = {name: config[name] for name in _SHAPE if config.get(name) is not None}
    own.setdefault("num_key_value_heads", own["num_attention_heads"])
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10_000.0
    rope.pop("type", None)
    rotary = {"rope_type": "default" if kind == "mrope" else kind, "rope_theta": theta, **rope}
    positions = {"positions": "mrope"} if rope.get("mrope_section") else {}
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    return {**own, **ids, **positions, "rope_parameters": rotary}


def build_head(
    make: Callable[[], Any],
    found: PublishedHead,
    layout: str,
    ignored: Collection[str] = (),
    zero: Collection[str] = (),
) -> Any:
    """Build a head and load the weights found under its own names, in their widest dtype.

    Weights that match a pattern in `ignored` are skipped; missing ones that match `zero` are set to
    zero. Raises ValueError for all other missing or unknown names, and for wrong shapes.
    """
    with torch.random.fork_rng(devices=[]):
        head = make()
    own = head.state_dict()
    used = {name: one for name, one in found.tensors.items() if not _is_one_of(name, ignored)}
    check_known(used, own, found.file, layout)
    lacking = sorted(name for name in own.keys() - used.keys() if not _is_one_of(name, zero))
    if lacking:
        raise ValueError(
            f"{found.file} lacks {len(lacking)} weights of {layout} ({', '.join(lacking[:3])}); "
            "copy it again, or give a head of that layout"
        )
    floats = [one.dtype for one in used.values() if one.is_floating_point()]
    dtype = torch.float32 if len(set(floats)) > 1 else floats[0]
    for name, one in used.items():
        if one.shape != own[name].shape:
            raise ValueError(
                f"{name} of {found.file} is {tuple(one.shape)}, and by its configuration "
                f"{tuple(own[name].shape)}; give the matching config.json"
            )
    made = {name: used.get(name, torch.zeros_like(one)) for name, one in own.items()}
    cast = {
        name: one.to(dtype) if own[name].is_floating_point() else one.to(own[name].dtype)
        for name, one in made.items()
    }
    head.load_state_dict(cast, assign=True)
    return head.train(False)


def rename_prefix(tensors: Mapping[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    """Return `tensors` with prefix `old` replaced by `new`."""
    return {
        f"{new}{name.removeprefix(old)}" if name.startswith(old) else name: one
        for name, one in tensors.items()
    }


def check_values(config: Mapping[str, Any], supported: Mapping[str, Any], file: Path) -> None:
    """Refuse settings other than the only supported value of each key. Raises ValueError.

    A missing key has its supported value.
    """
    for name, only in supported.items():
        if config.get(name, only) != only:
            raise ValueError(
                f"the head in {file} was trained with {name}={config[name]}, which is not "
                f"supported; only {name}={only} is"
            )


def llama_config(config: Any, architecture: str) -> dict[str, Any]:
    """Return the configuration of Llama layers in the flat form that inference engines read.

    Rotary settings are written twice: as transformers writes them, and in the older form.
    """
    rope = dict(config.rope_parameters)
    theta, kind = rope.pop("rope_theta", 10_000.0), rope.pop("rope_type", "default")
    kind = "mrope" if rope.get("mrope_section") else kind
    scaling = None if kind == "default" else {"type": kind, "rope_type": kind, **rope}
    own = {name: vars(config).get(name) for name in _SHAPE}
    windows = {name: vars(config).get(name) for name in ("sliding_window", "layer_types")}
    windows["use_sliding_window"] = True if windows["sliding_window"] else None
    return {
        "architectures": [architecture],
        "model_type": "llama",
        **{name: value for name, value in (own | windows).items() if value is not None},
        "num_hidden_layers": config.num_hidden_layers,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": kind, "rope_theta": theta, **rope},
    }


def count_layers(tensors: Mapping[str, Tensor], found: PublishedHead, extra: int = 0) -> int:
    """Number of decoder layers: those named `layers.N`, and `extra` ones under other names.

    Raises ValueError where the configuration has another number.
    """
    named = {match[1] for name in tensors if (match := re.match(r"layers\.(\d+)\.", name))}
    count, listed = extra + len(named), found.config.get("num_hidden_layers")
    if listed not in (None, count):
        raise ValueError(
            f"{found.file} has {count} decoder layers, but its configuration has "
            f"num_hidden_layers={listed}; give the matching config.json"
        )
    return count


def mark_tokens(offsets: Tensor, size: int) -> Tensor:  # (V',) -> (V,) bool
    """Mark the target tokens that a map leads to; out-of-range ones are left to `head.check()`."""
    ids = torch.arange(len(offsets)) + offsets
    found = torch.zeros(size, dtype=torch.bool)
    found[ids[(ids >= 0) & (ids < size)]] = True
    return found


def copy_tensors(head: Any) -> dict[str, Tensor]:
    """Copy the weights of a head, each into memory of its own."""
    return {name: one.detach().contiguous().clone() for name, one in head.state_dict().items()}


def check_head(head: Any, kind: Any, layout: str, plain: Mapping[str, Any]) -> None:
    """Refuse another kind of head, and settings that a format cannot express.

    Raises ValueError.
    """
    if not isinstance(head, kind):
        raise ValueError(
            f"format {layout} holds a {kind.__name__}, and this is a {type(head).__name__}; choose "
            "another format, or keep the folder as it is: this package reads it"
        )
    config: Any = head.config
    for name, only in plain.items():
        value = getattr(config, name)
        if value != only:
            raise ValueError(
                f"this head has {name}={value!r}, but format {layout} can only express {only!r}, "
                "which would change its drafts; keep the folder as it is"
            )


def _is_one_of(name: str, patterns: Collection[str]) -> bool:
    return any(re.fullmatch(one, name) for one in patterns)
