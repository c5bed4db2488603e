"""Published weight files: safetensors, or pickles without code."""

from __future__ import annotations

import pickle
from argparse import Namespace
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.serialization import safe_globals

from mmspec.errors import explain_load_errors

NESTS = ("model", "module", "state_dict")  # keys of the weights in training checkpoints
WRAPPERS = ("_orig_mod.", "module.")  # prefixes of torch.compile and data parallel


def read_weights(file: Path, nests: Collection[str] = NESTS) -> dict[str, Tensor]:
    """Read the tensors of a file under their published names.

    Pickles are read with `weights_only=True`, so no code runs; pickles that need code are refused.
    Of a training checkpoint, the tensors under the first key of `nests` are read. Raises ValueError
    naming the file.
    """
    if not file.is_file():
        raise ValueError(f"there is no file {file}; give the weights as they were downloaded")
    if file.suffix == ".safetensors":
        with explain_load_errors(file, "file of weights"):
            return load_file(file)
    found = _unpickle(file)
    inner = next((found[name] for name in nests if isinstance(found.get(name), Mapping)), found)
    tensors = {str(name): value for name, value in inner.items() if isinstance(value, Tensor)}
    if not tensors:
        raise ValueError(
            f"{file} holds no tensors, neither directly nor under {', '.join(nests)}, but "
            f"{', '.join(map(str, [*found][:5])) or 'nothing'}; give a file of weights"
        )
    for wrapper in WRAPPERS:
        if all(name.startswith(wrapper) for name in tensors):
            tensors = {name.removeprefix(wrapper): value for name, value in tensors.items()}
    return tensors


def _unpickle(file: Path) -> Mapping[str, Any]:
    try:
        with safe_globals([Namespace]):  # options of a training script
            found = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = " ".join(str(error).split()).partition("Please file")[0][:300]
        raise ValueError(
            f"{file} cannot be read without running its code ({reason}); convert a file that "
            "holds tensors only"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise ValueError(f"{file} is damaged ({error}); copy or download it again") from error
    if not isinstance(found, Mapping):
        raise ValueError(
            f"{file} holds a {type(found).__name__}, not named weights; give a checkpoint"
        )
    return found


def check_known(found: Collection[str], known: Collection[str], file: Path, layout: str) -> None:
    """Refuse names that the format does not have. Raises ValueError with some of them."""
    foreign = sorted(set(found) - set(known))
    if foreign:
        raise ValueError(
            f"{file} holds {len(foreign)} weights that {layout} does not have "
            f"({', '.join(foreign[:3])}); give a file of that format"
        )
