"""Where the models of a command are loaded; all is checked before weights are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from mmspec import zoo
from mmspec.cli.options import DRAFTER_DEVICE, flag
from mmspec.modalities.common.doctor_tokens import find_head_kind
from mmspec.modality import Modality
from mmspec.models import footprint
from mmspec.models.placement import Placement, parse_device
from mmspec.registry import ZOO

ON_ALL_MODELS = ("device", "dtype", "attn")  # options that draft models are loaded with, too
Keywords = dict[str, Placement]  # of `Plug.load` and `Formatting.load_drafter`; empty = as usual


def check_placement(placed: Mapping[str, str], owner: Modality, model: str) -> None:
    """Refuse options that the modality cannot honour. Raises one ValueError naming its own."""
    foreign = [flag(name) for name in placed if name not in owner.placement]
    if foreign:
        known = ", ".join(map(flag, owner.placement)) or "none of them"
        raise ValueError(
            f"{', '.join(foreign)}: models of modality {owner.name}, such as {model}, are not "
            f"loaded with it; they take {known}"
        )


def place(
    placed: Mapping[str, str], model: str, drafters: Sequence[str] = ()
) -> tuple[Keywords, Keywords]:
    """The keyword arguments that load a target, and those that load its draft models.

    Raises ValueError for what is not there and for weights that the memory cannot hold. Weights
    that a device map spreads are not checked: they spill onto the disk.
    """
    target = Placement(**{name: one for name, one in placed.items() if name != DRAFTER_DEVICE})
    own = {name: placed[name] for name in ON_ALL_MODELS if name in placed}
    if DRAFTER_DEVICE in placed:
        _check_separable(drafters)
        own["device"] = placed[DRAFTER_DEVICE]
    small = Placement(**own)
    needs: dict[torch.device, dict[str, int]] = {}
    for name, one in ((model, target), *((name, small) for name in drafters)):
        size = None if one.device_map is not None else find_weight_bytes(name, one)
        if size is not None:
            needs.setdefault(parse_device(one.device), {})[name] = size
    for device, sizes in needs.items():
        footprint.check_memory(sizes, device)
    return tuple({"placement": one} if one.given else {} for one in (target, small))  # type: ignore[return-value]


def _check_separable(drafters: Sequence[str]) -> None:
    """Refuse a device for draft models that are none, or heads. Raises ValueError."""
    if not drafters:
        raise ValueError("--drafter-device: no draft model is loaded; drop it, or give --drafter")
    for name in drafters:
        folder = zoo.path(name.removeprefix(ZOO)) if name.startswith(ZOO) else Path(name)
        kind = find_head_kind(folder) if folder.is_dir() else None
        if kind is not None:
            raise ValueError(
                f"--drafter-device: {name} is a {kind.description}, which reads the target's "
                "states on the target's device; drop it"
            )


def find_weight_bytes(name: str, placement: Placement) -> int | None:
    """Bytes of the weights of a model, as they will be loaded; None where they are unknown."""
    if name.startswith(ZOO):
        folder = zoo.path(name.removeprefix(ZOO))
        return footprint.weight_bytes(folder, placement, torch.float32)
    if Path(name).is_dir():
        return footprint.weight_bytes(Path(name), placement)
    return footprint.hub_bytes(name, placement)
