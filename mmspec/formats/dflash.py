"""DFlash drafters as published by their authors, and read by vLLM, SGLang and SpecForge.

A flat configuration of Qwen3's layers, with `block_size` and a `dflash_config` of the mask token
and the layers whose outputs are fused: id l is hidden state l + 1 in Hugging Face's order.
Embeddings are the target's, and so is the output head, unless a `d2t` map comes with one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.formats.head_files import (
    PublishedHead,
    build_head,
    check_head,
    check_values,
    copy_tensors,
    count_layers,
    head_format,
    llama_config,
    mark_tokens,
    open_head,
    read_sizes,
)
from mmspec.formats.vllm import check_order
from mmspec.models.compatibility import AFTER_NORM, check_exports_taps
from mmspec.models.heads.dflash import DFlashHead, DFlashHeadConfig
from mmspec.models.llama_layers import SLIDING

NESTED, IDS = "dflash_config", "target_layer_ids"
MASK_FILE = "mask_embedding.pt"  # of vLLM
_ONLY = {  # settings that change the computation
    **{"is_neox_style": True, "logit_scale": 1.0, "is_causal": False, "hidden_act": "silu"},
    "add_swa_attention_sink_bias": False,
}
_NESTED_ONLY = {
    **{"causal": False, "use_swa": False, "attention_sink_bias": False, "shift_label": False},
    **{"attention_value_scale": None, "projector_type": None, "use_aux_hidden_state": True},
    **{"sample_from_anchor": False, "pure_draft_prefix_len": 0},
}


def convert(files: Sequence[Path], options: Mapping[str, Any]) -> DFlashHead:
    """Convert the drafter in a folder.

    Raises ValueError for settings of its successors, and where it lists no layers.
    """
    found = open_head(files)
    if (found.file.parent / MASK_FILE).exists():
        raise ValueError(
            f"{found.file.parent} has a {MASK_FILE}, an embedding of the mask token beside the "
            "target's table, which is not supported"
        )
    ids = (found.config.get(NESTED) or {}).get(IDS)
    return build_dflash_head(found, None if ids is None else [int(one) + 1 for one in ids])


def build_dflash_head(found: PublishedHead, taps: Sequence[int] | None) -> DFlashHead:
    """Build a head from weights of the shared names; `taps` are Hugging Face hidden state indices.

    Raises ValueError for missing settings, and for those that are not supported.
    """
    own, nested = read_sizes(found.config, found.file), found.config.get(NESTED) or {}
    size = found.config.get("block_size") or nested.get("block_size")
    given = {"block_size": size, "mask_token_id": nested.get("mask_token_id"), IDS: taps}
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise ValueError(
            f"the configuration of {found.file} lacks {', '.join(missing)}; give a head of DFlash, "
            "or copy it again"
        )
    assert taps is not None
    wide = found.config.get("target_hidden_size")
    if wide not in (None, own["hidden_size"]):
        raise ValueError(
            f"the head in {found.file} is {own['hidden_size']} wide and its target {wide}, but a "
            "DFlash head embeds tokens with the target's table; only equal widths are supported"
        )
    check_values(found.config, _ONLY, found.file)
    check_values(nested, _NESTED_ONLY, found.file)
    if SLIDING in (found.config.get("layer_types") or ()):
        raise ValueError(
            f"the head in {found.file} has layers with {SLIDING}, whose window engines place "
            "differently around a block; only full attention is supported"
        )
    tensors = dict(found.tensors)
    cut = len(tensors["lm_head.weight"]) if "d2t" in tensors and "lm_head.weight" in tensors else 0
    if "t2d" in tensors:
        own["vocab_size"] = len(tensors["t2d"])
    elif cut:
        tensors["t2d"] = mark_tokens(tensors["d2t"], own["vocab_size"])
    config = DFlashHeadConfig(
        **own,
        num_hidden_layers=count_layers(tensors, found),
        block_size=int(size or 0),
        mask_token_id=int(nested["mask_token_id"]),
        tapped_layers=list(taps),
        num_taps=len(taps),
        num_target_layers=found.config.get("num_target_layers"),
        draft_vocab_size=cut or None,
        attention_bias="layers.0.self_attn.q_proj.bias" in tensors,
    )
    setattr(config, AFTER_NORM, False)
    made = PublishedHead(found.config, tensors, found.file)
    head: DFlashHead = build_head(lambda: DFlashHead(config), made, "DFlash")
    head.check()
    return head


def dflash_to_flat(head: Any, layout: str) -> PublishedHead:
    """Return the flat configuration without layer ids, and the weights.

    Raises ValueError for another kind of head, and for settings that engines cannot express.
    """
    check_head(head, DFlashHead, layout, {"positions": "keep", "visual_slots": "fused"})
    layers = head.config.tapped_layers
    if layers is None:
        raise ValueError(
            "this head has no list of tapped_layers, and engines need one; set that in its "
            "config.json, from mmspec.models.heads.dflash.uniform_layers"
        )
    check_order(layers)
    check_exports_taps(head.config)
    config, tensors = head.config, copy_tensors(head)
    size = config.draft_vocab_size or config.vocab_size
    made = {**llama_config(config, "DFlashDraftModel"), "model_type": "qwen3"}
    made |= {"draft_vocab_size": size, "block_size": config.block_size}
    made |= {"num_target_layers": config.num_target_layers}
    return PublishedHead(made, tensors)


def export(head: Any, target: str | None) -> PublishedHead:
    """Export a drafter for the engines. Raises ValueError where it taps the embeddings."""
    made = dflash_to_flat(head, "dflash")
    ids = [one - 1 for one in head.config.tapped_layers]
    if ids[0] < 0:
        raise ValueError(
            "this head taps hidden state 0, the embeddings, but format dflash lists outputs of "
            "layers; train a head with other tapped_layers"
        )
    nested = {"mask_token_id": head.config.mask_token_id, IDS: ids}
    return PublishedHead({**made.config, NESTED: nested}, made.tensors)


FORMAT = head_format(
    "DFlash (Chen et al. 2026): drafters of blocks, of their authors, vLLM, SGLang and SpecForge.",
    convert,
    export,
)
