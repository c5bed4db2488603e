"""Hydra and Hydra++ heads as published (Ankner et al. 2024): a pickle and a configuration.

The layer of Hydra++ has the sizes of its base model. The configuration only names that model, so
the sizes are read from its folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.formats.head_files import build_head, check_values, head_format, open_head, read_sizes
from mmspec.models.folder import read_json
from mmspec.models.heads.hydra import HydraHeads, HydraHeadsConfig

WEIGHTS = ("hydra_lm_head.safetensors", "hydra_lm_head.pt")
IGNORED = (r"prefix_embeding_layer\.embed_tokens\.weight", r".*\.rotary_emb\.inv_freq")
ONLY = {"grounded_heads": True, "hidden_state_offset": 0}
FIRST, OUTPUT = "hydra_mlp.0.1.linear.weight", "hydra_lm_head.0.1.weight"
PREFIXED = "prefix_embeding_layer.norm.weight"


def convert(files: Sequence[Path], options: Mapping[str, Any]) -> HydraHeads:
    """Convert the heads in a folder. Raises ValueError for Hydra++ without its base model."""
    found = open_head(files, WEIGHTS)
    check_values(found.config, ONLY, found.file)
    for name in (FIRST, OUTPUT):
        if name not in found.tensors:
            raise ValueError(f"{found.file} lacks {name}; give heads of Hydra, grounded ones")
    size, width = found.tensors[OUTPUT].shape
    sizes: dict[str, Any] = {"hidden_size": width, "vocab_size": size}
    is_prefixed = PREFIXED in found.tensors
    if is_prefixed:
        sizes = {**_base(options.get("base"), found.file), **sizes}
    places = [name.split(".") for name in found.tensors if name.startswith("hydra_mlp.")]
    config = HydraHeadsConfig(
        **sizes,
        hydra_num_heads=1 + max(int(place[1]) for place in places),
        hydra_num_layers=(1 + max(int(place[2]) for place in places)) // 2,  # dropout between
        hydra_head_arch="prefix-mlp" if is_prefixed else "mlp",
    )
    heads: HydraHeads = build_head(lambda: HydraHeads(config), found, "Hydra", IGNORED)
    return heads


def _base(folder: Any, file: Path) -> dict[str, Any]:
    """Read the layer sizes of the base model. Raises ValueError where it is not given."""
    there = Path(str(folder)) / "config.json"
    if folder is None or not there.is_file():
        raise ValueError(
            f"{file} has a layer of its base model's sizes (Hydra++), which the file lacks; give "
            "base= the folder of that model (its config.json is enough)"
        )
    return read_sizes(read_json(there), there)


FORMAT = head_format(
    "Hydra, Hydra++ (Ankner et al. 2024): heads conditioned on earlier draft tokens.",
    convert,
    base="For Hydra++: the folder of its base model; config.json is enough.",
)
