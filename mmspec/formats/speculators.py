"""EAGLE-3 heads in the format of the `speculators` library, which vLLM serves.

The layer is named `layers.0`, its configuration is nested, and layer ids are vLLM's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.formats.eagle_3 import IDS, VARIANTS, Dialect, build_eagle3_head, to_published
from mmspec.formats.head_files import (
    PublishedHead,
    check_head,
    head_format,
    open_head,
    rename_prefix,
)
from mmspec.formats.vllm import EXPRESSIBLE
from mmspec.models.heads.eagle3 import Eagle3Head

KIND, NESTED = "speculators_model_type", "transformer_layer_config"
LAYER, OURS = "layers.0.", "midlayer."
VERSION = "0.9.0"
TOKENS = 5  # default draft length of engines
SPECULATORS = Dialect("speculators", EXPRESSIBLE)
_FLAT = ("rope_theta", "rope_scaling", "architectures", "draft_vocab_size", "target_hidden_size")


def convert(files: Sequence[Path], options: Mapping[str, Any]) -> Eagle3Head:
    """Convert the head in a folder. Raises ValueError for other kinds than EAGLE-3."""
    found = open_head(files)
    kind, nested = found.config.get(KIND), found.config.get(NESTED)
    if kind != "eagle3" or not isinstance(nested, Mapping):
        raise ValueError(
            f"the configuration of {found.file} has {KIND}={kind!r}; only 'eagle3' with a "
            f"{NESTED} is supported"
        )
    flat = {**nested, "target_hidden_size": found.config.get("target_hidden_size")}
    flat |= {name: found.config.get(name, False) for name in VARIANTS}
    ids = found.config.get(IDS)
    left = {name: one for name, one in found.tensors.items() if not name.startswith("verifier_")}
    return build_eagle3_head(PublishedHead(flat, left, found.file), ids, SPECULATORS)


def export(head: Any, target: str | None) -> PublishedHead:
    """Export a head with the fields that vLLM requires. Raises ValueError without a target name."""
    check_head(head, Eagle3Head, "speculators", {"positions": "keep"})
    is_name = target is not None and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", target)
    if not is_name or Path(str(target)).exists():
        raise ValueError(
            f"this format needs the target's hub name, and {target!r} is not one; give --target "
            "ORGANISATION/MODEL"
        )
    made = to_published(head, SPECULATORS, None)
    left_out = (*_FLAT, *VARIANTS)
    layer = {name: value for name, value in made.config.items() if name not in left_out}
    method = {"proposal_type": "greedy", "speculative_tokens": TOKENS}
    config = {
        KIND: "eagle3",
        "speculators_version": VERSION,
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": made.config["draft_vocab_size"],
        "target_hidden_size": head.config.target_hidden_size,
        IDS: head.config.tapped_layers and list(head.config.tapped_layers),
        **{name: made.config[name] for name in VARIANTS},
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{**method, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target, "architectures": []},
        },
        NESTED: layer,
        "tie_word_embeddings": False,
    }
    return PublishedHead(config, rename_prefix(made.tensors, OURS, LAYER))


FORMAT = head_format("EAGLE-3 in the format of speculators 0.9, for vLLM.", convert, export)
