"""EAGLE-3 heads as published (Li et al. 2025), and the shared code of its variants.

All variants use one set of weight names. They differ in the meaning of layer id l in the
configuration: the input of layer l (vLLM), which is hidden state l in Hugging Face's order, or its
output (SGLang, SpecForge, AngelSlim), hidden state l + 1. The authors' own heads list no layers and
tap 2, L // 2 and L - 3. Heads with a list must be converted by the format that defines its meaning.
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
    head_format,
    llama_config,
    open_head,
    read_sizes,
)
from mmspec.models.heads.eagle3 import Eagle3Head, Eagle3HeadConfig

IDS = "eagle_aux_hidden_state_layer_ids"
IGNORED = (r"embed_tokens\.weight",)
PLAIN = {"visual_slots": "fused", "num_steps": 0, "num_taps": 3, "visual_keep": 1.0}
ONLY = {"fc_norm": False, "norm_before_fc": False, "norm_before_residual": False}


def convert(files: Sequence[Path], options: Mapping[str, Any]) -> Eagle3Head:
    """Convert the head in a folder. Raises ValueError where it lists layers."""
    found = open_head(files)
    ids = listed_layers(found.config)
    if ids is not None:
        raise ValueError(
            f"the configuration of {found.file} lists layers {ids}, which mean their inputs "
            "in vLLM, and their outputs in SGLang, SpecForge and AngelSlim; convert it by format "
            "vllm, sglang or angelslim"
        )
    return build_eagle3_head(found, None, "EAGLE-3")


def listed_layers(config: Mapping[str, Any]) -> list[int] | None:
    """Return the layer ids in a flat configuration, None where it has none."""
    nested = config.get("eagle_config") or {}
    ids = nested.get(IDS) or config.get(IDS)
    return None if ids is None else [int(one) for one in ids]


def build_eagle3_head(found: PublishedHead, taps: Sequence[int] | None, layout: str) -> Eagle3Head:
    """Build a head from weights of the shared names; `taps` are Hugging Face hidden state indices.

    Raises ValueError for a vocabulary map that is out of range or inconsistent.
    """
    check_values(found.config, {**ONLY, "norm_output": True}, found.file)
    for name in ("lm_head.weight", "fc.weight"):
        if name not in found.tensors:
            raise ValueError(f"{found.file} lacks {name}; give a head of {layout}")
    tensors, own = dict(found.tensors), read_sizes(found.config, found.file)
    draft_size, size = len(tensors["lm_head.weight"]), own["vocab_size"]
    if "t2d" in tensors:
        size = own["vocab_size"] = len(tensors["t2d"])
    elif "d2t" in tensors and draft_size < size:
        tensors["t2d"] = _mask(tensors["d2t"], size)
    if draft_size == size:  # identity maps
        tensors.pop("t2d", None)
        tensors.pop("d2t", None)
    wide = found.config.get("target_hidden_size")
    own |= {} if wide in (None, own["hidden_size"]) else {"visual_slots": "placeholder"}
    config = Eagle3HeadConfig(
        **own,
        draft_vocab_size=None if draft_size == size else draft_size,
        target_hidden_size=None if wide == own["hidden_size"] else wide,
        tapped_layers=None if taps is None else list(taps),
        num_taps=3 if taps is None else len(taps),
        attention_bias="midlayer.self_attn.q_proj.bias" in tensors,
    )
    ignored = () if config.target_hidden_size else IGNORED
    published = PublishedHead(found.config, tensors, found.file)
    head: Eagle3Head = build_head(
        lambda: Eagle3Head(config),
        published,
        layout,
        ignored,
        (r"midlayer\.self_attn\.o_proj\.bias",),
    )
    head.check()
    return head


def _mask(offsets: Any, size: int) -> Any:  # (V',) -> (V,) bool
    """Mark the target tokens that a map leads to; out-of-range ones are left to `head.check()`."""
    ids = offsets.new_tensor(range(len(offsets))) + offsets
    found = offsets.new_zeros(size, dtype=bool)
    found[ids[(ids >= 0) & (ids < size)]] = True
    return found


def to_published(head: Any, layout: str, ids: Sequence[int] | None) -> PublishedHead:
    """Return the flat configuration and the weights; with `ids`, the configuration lists layers."""
    plain = {**PLAIN, "visual_slots": "placeholder"} if is_wide_head(head) else PLAIN
    check_head(head, Eagle3Head, layout, plain)
    config, tensors = head.config, copy_tensors(head)
    if config.attention_bias and bool(tensors.pop("midlayer.self_attn.o_proj.bias").any()):
        raise ValueError(
            "midlayer.self_attn.o_proj.bias of this head is not zero, and engines do not read it; "
            "train a head with attention_bias=False"
        )
    size = config.draft_vocab_size or config.vocab_size
    made = {**llama_config(config, "LlamaForCausalLMEagle3"), "draft_vocab_size": size}
    if config.target_hidden_size:
        made["target_hidden_size"] = config.target_hidden_size
    if ids is not None:
        made["eagle_config"] = {IDS: list(ids), "use_aux_hidden_state": True}
    return PublishedHead(made, tensors)


def is_wide_head(head: Any) -> bool:
    """Whether the head's width differs from the target's, so it has its own embedding table."""
    return isinstance(head, Eagle3Head) and head.embeddings is not None


def export(head: Any, target: str | None) -> PublishedHead:
    """Export a head for the authors' code. Raises ValueError for non-default tapped layers."""
    check_head(head, Eagle3Head, "eagle-3", {"tapped_layers": None, "positions": "keep"})
    return to_published(head, "eagle-3", None)


FORMAT = head_format(
    "EAGLE-3 (Li et al. 2025): heads on three layers with a draft vocabulary.", convert, export
)
