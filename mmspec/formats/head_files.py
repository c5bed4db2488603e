"""Heads as their authors publish them: a folder with config.json and one file of weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmspec.formats import Format
from mmspec.formats.published import check_known, weights
from mmspec.models.folder import configuration

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
FILES = ("its folder, or config.json", "[the weights]")
_SHAPE = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rms_norm_eps", "max_position_embeddings", "hidden_act", "vocab_size", "initializer_range"),
)
_NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class PublishedHead:
    """A head under the names of a layout: what is read, and what is written."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    file: Path = Path("model.safetensors")  # the weights, for errors


def head_format(
    about: str,
    convert: Callable[[Sequence[Path], Mapping[str, Any]], Any],
    export: Callable[[Any, str | None], PublishedHead] | None = None,
    **options: str,
) -> Format:
    """A layout of heads; `options` are what no file says, and what each is."""
    return Format(about, FILES, convert, options, export)


def opened(paths: Sequence[Path], names: Sequence[str] = WEIGHTS) -> PublishedHead:
    """A folder, or its two files. Raises ValueError for what is not there, or needs code."""
    first = paths[0]
    folder = first if first.is_dir() else first.parent
    file = first / "config.json" if first.is_dir() else first
    if not file.is_file():
        raise ValueError(f"there is no {file}; give the folder as it was downloaded")
    there = [folder / name for name in names if (folder / name).is_file()]
    found = paths[1] if len(paths) > 1 else next(iter(there), folder / names[0])
    return PublishedHead(configuration(file), weights(found), found)


def shape(config: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Sizes and rotary positions as our configurations name them.

    Raises ValueError for sizes that are missing.
    """
    missing = [name for name in _NEEDED if config.get(name) is None]
    if missing:
        raise ValueError(
            f"the configuration beside {file} lacks {', '.join(missing)}; copy it again, or give a "
            "head of this layout"
        )
    own = {name: config[name] for name in _SHAPE if config.get(name) is not None}
    own.setdefault("num_key_value_heads", own["num_attention_heads"])
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10_000.0
    rope.pop("type", None)
    turned = {"rope_type": "default" if kind == "mrope" else kind, "rope_theta": theta, **rope}
    positions = {"positions": "mrope"} if rope.get("mrope_section") else {}
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    return {**own, **ids, **positions, "rope_parameters": turned}


def filled(
    make: Callable[[], Any],
    found: PublishedHead,
    layout: str,
    ignored: Collection[str] = (),
    zero: Collection[str] = (),
) -> Any:
    """The head with the weights that were found under its own names, in their widest dtype.

    Patterns of names: `ignored` may be there and are left, `zero` may be missing and are zero. All
    others raise ValueError where they are missing or have no place, and so do other shapes.
    """
    with torch.random.fork_rng(devices=[]):
        head = make()
    own = head.state_dict()
    kept = {name: one for name, one in found.tensors.items() if not _is_one_of(name, ignored)}
    check_known(kept, own, found.file, layout)
    lacking = sorted(name for name in own.keys() - kept.keys() if not _is_one_of(name, zero))
    if lacking:
        raise ValueError(
            f"{found.file} lacks {len(lacking)} weights of {layout} ({', '.join(lacking[:3])}); "
            "copy it again, or give a head of that layout"
        )
    floats = [one.dtype for one in kept.values() if one.is_floating_point()]
    dtype = torch.float32 if len(set(floats)) > 1 else floats[0]
    for name, one in kept.items():
        if one.shape != own[name].shape:
            raise ValueError(
                f"{name} of {found.file} is {tuple(one.shape)}, and by its configuration "
                f"{tuple(own[name].shape)}; give the config.json that lies beside it"
            )
    made = {name: kept.get(name, torch.zeros_like(one)) for name, one in own.items()}
    cast = {
        name: one.to(dtype) if own[name].is_floating_point() else one.to(own[name].dtype)
        for name, one in made.items()
    }
    head.load_state_dict(cast, assign=True)
    return head.train(False)


def renamed(tensors: Mapping[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    """The same with another prefix."""
    return {
        f"{new}{name.removeprefix(old)}" if name.startswith(old) else name: one
        for name, one in tensors.items()
    }


def refuse(config: Mapping[str, Any], unlike: Mapping[str, Any], file: Path) -> None:
    """Refuse what this package computes otherwise: keys, and their only value. Raises ValueError.

    A key that is missing has that value.
    """
    for name, only in unlike.items():
        if config.get(name, only) != only:
            raise ValueError(
                f"the head in {file} was trained with {name}={config[name]}, which is not computed "
                f"here; only {name}={only} is"
            )


def llama(config: Any, architecture: str) -> dict[str, Any]:
    """The configuration of one Llama layer in the flat form that engines read.

    Rotary positions stand in it twice: as transformers writes them, and as engines still read them.
    """
    rope = dict(config.rope_parameters)
    theta, kind = rope.pop("rope_theta", 10_000.0), rope.pop("rope_type", "default")
    kind = "mrope" if rope.get("mrope_section") else kind
    scaling = None if kind == "default" else {"type": kind, "rope_type": kind, **rope}
    own = {name: vars(config).get(name) for name in _SHAPE}
    return {
        "architectures": [architecture],
        "model_type": "llama",
        **{name: value for name, value in own.items() if value is not None},
        "num_hidden_layers": config.num_hidden_layers,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": kind, "rope_theta": theta, **rope},
    }


def own_tensors(head: Any) -> dict[str, Tensor]:
    """The weights of a head under its own names, each with memory of its own."""
    return {name: one.detach().contiguous().clone() for name, one in head.state_dict().items()}


def check_head(head: Any, kind: Any, layout: str, plain: Mapping[str, Any]) -> None:
    """Refuse what a layout cannot hold: another head, or parts of another value.

    Raises ValueError.
    """
    if not isinstance(head, kind):
        raise ValueError(
            f"format {layout} holds a {kind.__name__}, and this is a {type(head).__name__}; choose "
            "another format, or keep it as it is, for this package alone"
        )
    config: Any = head.config
    for name, only in plain.items():
        value = getattr(config, name)
        if value != only:
            raise ValueError(
                f"this head has {name}={value!r}, and format {layout} has no word for that, only "
                f"for {only!r}: whoever read it would draft otherwise; keep it as it is"
            )


def _is_one_of(name: str, patterns: Collection[str]) -> bool:
    return any(re.fullmatch(one, name) for one in patterns)
