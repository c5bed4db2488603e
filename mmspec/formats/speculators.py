"""Heads in the format of the `speculators` library, which vLLM serves: EAGLE-3, P-EAGLE, DFlash.

The configuration of the layers is nested, and layer ids are vLLM's. The first layer of EAGLE-3 and
P-EAGLE is named `layers.0`. P-EAGLE has a trained embedding table; DFlash has the target's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.formats.dflash import build_dflash_head, dflash_to_flat
from mmspec.formats.eagle_3 import IDS, VARIANTS, Dialect, build_eagle3_head, to_published
from mmspec.formats.head_files import (
    PublishedHead,
    check_head,
    check_values,
    head_format,
    open_head,
    rename_prefix,
)
from mmspec.formats.p_eagle import build_p_eagle_head
from mmspec.formats.vllm import EXPRESSIBLE
from mmspec.models.heads.dflash import DFlashHead
from mmspec.models.heads.eagle3 import Eagle3Head
from mmspec.models.heads.p_eagle import PEagleHead

KIND, NESTED = "speculators_model_type", "transformer_layer_config"
LAYER, OURS = "layers.0.", "midlayer."
VERSION = "0.9.0"
TOKENS = 5  # default draft length of engines
SPECULATORS = Dialect("speculators", EXPRESSIBLE)
TABLE, DFLASH_IDS = "embed_tokens.weight", "aux_hidden_state_layer_ids"
_CLASSES = {
    "eagle3": "Eagle3DraftModel",
    "peagle": "PEagleDraftModel",
    "dflash": "DFlashDraftModel",
}
_FLAT = (
    *("rope_theta", "rope_scaling", "architectures", "draft_vocab_size", "target_hidden_size"),
    *("dflash_config", "block_size", "num_target_layers"),
)


def convert(files: Sequence[Path], options: Mapping[str, Any]) -> Any:
    """Convert the head in a folder. Raises ValueError for other kinds of heads."""
    found = open_head(files)
    kind, nested = found.config.get(KIND), found.config.get(NESTED)
    if kind not in READERS or not isinstance(nested, Mapping):
        raise ValueError(
            f"the configuration of {found.file} has {KIND}={kind!r}; only "
            f"{', '.join(map(repr, READERS))} with a {NESTED} are supported"
        )
    left = {name: one for name, one in found.tensors.items() if not name.startswith("verifier_")}
    return READERS[kind](PublishedHead({**found.config, NESTED: dict(nested)}, left, found.file))


def _read_eagle3(found: PublishedHead) -> Eagle3Head:
    head: Eagle3Head = build_eagle3_head(_flatten(found), found.config.get(IDS), SPECULATORS)
    return head


def _read_p_eagle(found: PublishedHead) -> PEagleHead:
    depths = _read_tokens(found)
    token = found.config.get("mask_token_id")
    return build_p_eagle_head(_flatten(found), found.config.get(IDS), token, num_depths=depths)


def _read_dflash(found: PublishedHead) -> DFlashHead:
    config = found.config
    check_values(config, {"sample_from_anchor": False}, found.file)
    tensors = {name: one for name, one in found.tensors.items() if name != TABLE}
    flat = {**config[NESTED], "target_hidden_size": config.get("target_hidden_size")}
    flat["dflash_config"] = {"mask_token_id": config.get("mask_token_id")}
    flat["block_size"] = config.get("block_size")
    ids = config.get(DFLASH_IDS)
    return build_dflash_head(PublishedHead(flat, tensors, found.file), ids)


READERS = {"eagle3": _read_eagle3, "peagle": _read_p_eagle, "dflash": _read_dflash}


def _flatten(found: PublishedHead) -> PublishedHead:
    """The configuration of EAGLE-3's layout in its flat form."""
    flat = {**found.config[NESTED], "target_hidden_size": found.config.get("target_hidden_size")}
    flat |= {name: found.config.get(name, False) for name in VARIANTS}
    return PublishedHead(flat, found.tensors, found.file)


def _read_tokens(found: PublishedHead) -> int:
    """Tokens that the head drafts at once. Raises ValueError where none are given."""
    methods = (found.config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    tokens = methods[0].get("speculative_tokens")
    if not tokens:
        raise ValueError(
            f"the configuration of {found.file} has no speculative_tokens, the number of tokens "
            "that the head was trained to draft; copy it again"
        )
    return int(tokens)


def export(head: Any, target: str | None) -> PublishedHead:
    """Export a head with the fields that vLLM requires. Raises ValueError without a target name."""
    is_name = target is not None and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", target)
    writer = next((one for kind, one in WRITERS.items() if isinstance(head, kind)), _write_eagle3)
    made = writer(head, str(target))
    if not is_name or Path(str(target)).exists():
        raise ValueError(
            f"this format needs the target's hub name, and {target!r} is not one; give --target "
            "ORGANISATION/MODEL"
        )
    return made


def _write_eagle3(head: Any, target: str) -> PublishedHead:
    check_head(head, Eagle3Head, "speculators", {"positions": "keep"})
    made = to_published(head, SPECULATORS, None)
    config = {**_common("eagle3", TOKENS, made, target), **_eagle3_fields(head, made)}
    return PublishedHead(config, rename_prefix(made.tensors, OURS, LAYER))


def _write_p_eagle(head: Any, target: str) -> PublishedHead:
    check_head(head, PEagleHead, "speculators", {"positions": "keep", "own_embeddings": True})
    made, own = to_published(head, SPECULATORS, None), head.config
    config = {**_common("peagle", own.num_depths, made, target), **_eagle3_fields(head, made)}
    config["mask_token_id"] = own.mask_token_id
    return PublishedHead(config, rename_prefix(made.tensors, OURS, LAYER))


def _write_dflash(head: Any, target: str) -> PublishedHead:
    made, own = dflash_to_flat(head, "speculators"), head.config
    config = {
        **_common("dflash", head.reach, made, target),
        DFLASH_IDS: list(own.tapped_layers),
        "block_size": own.block_size,
        "mask_token_id": own.mask_token_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,  # vLLM 0.32 also makes full attention causal without it
    }
    return PublishedHead(config, made.tensors)


WRITERS = {PEagleHead: _write_p_eagle, DFlashHead: _write_dflash}


def _eagle3_fields(head: Any, made: PublishedHead) -> dict[str, Any]:
    layers = head.config.tapped_layers
    return {
        "target_hidden_size": head.config.target_hidden_size,
        IDS: layers and list(layers),
        **{name: made.config[name] for name in VARIANTS},
    }


def _common(kind: str, tokens: int, made: PublishedHead, target: str) -> dict[str, Any]:
    """Fields of all kinds; engines draft so many `tokens`."""
    layer = {name: value for name, value in made.config.items() if name not in (*_FLAT, *VARIANTS)}
    method = {"proposal_type": "greedy", "speculative_tokens": tokens}
    return {
        KIND: kind,
        "speculators_version": VERSION,
        "architectures": [_CLASSES[kind]],
        "draft_vocab_size": made.config["draft_vocab_size"],
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{**method, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target, "architectures": []},
        },
        NESTED: layer,
        "tie_word_embeddings": False,
    }


FORMAT = head_format(
    "EAGLE-3, P-EAGLE and DFlash in the format of speculators 0.9, for vLLM.", convert, export
)
