"""EAGLE-3 as its authors publish heads (Li et al. 2025), and what its dialects share.

All have one set of names. They differ in what a list of tapped layers in the configuration means:
id l is the state that enters layer l (vLLM), which Hugging Face counts as hidden state l, or that
leaves it (SGLang, SpecForge, AngelSlim), hidden state l + 1. The authors' own have no list; all
tap 2, L // 2 and L - 3 then. A file with a list is read by the format that says which is meant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.formats.head_files import (
    PublishedHead,
    check_head,
    filled,
    head_format,
    llama,
    opened,
    own_tensors,
    refuse,
    shape,
)
from mmspec.models.heads.eagle3 import Eagle3Head, Eagle3HeadConfig

IDS = "eagle_aux_hidden_state_layer_ids"
IGNORED = (r"embed_tokens\.weight",)
PLAIN = {"visual_slots": "fused", "num_steps": 0, "num_taps": 3, "visual_keep": 1.0}
ONLY = {"fc_norm": False, "norm_before_fc": False, "norm_before_residual": False}


def convert(files: Sequence[Path], options: Mapping[str, Any]) -> Eagle3Head:
    """The head that a folder holds. Raises ValueError where it lists layers."""
    found = opened(files)
    ids = listed(found.config)
    if ids is not None:
        raise ValueError(
            f"the configuration beside {found.file} lists layers {ids}, which mean the states that "
            "enter them in vLLM, and those that leave them in SGLang, SpecForge and AngelSlim; "
            "convert it by format vllm, sglang or angelslim"
        )
    return read(found, None, "EAGLE-3")


def listed(config: Mapping[str, Any]) -> list[int] | None:
    """The list of layers in a flat configuration."""
    nested = config.get("eagle_config") or {}
    ids = nested.get(IDS) or config.get(IDS)
    return None if ids is None else [int(one) for one in ids]


def read(found: PublishedHead, taps: Sequence[int] | None, layout: str) -> Eagle3Head:
    """A head of the canonical names that taps hidden states of these Hugging Face indices.

    Raises ValueError for a vocabulary map that is out of range or contradicts itself.
    """
    refuse(found.config, {**ONLY, "norm_output": True}, found.file)
    for name in ("lm_head.weight", "fc.weight"):
        if name not in found.tensors:
            raise ValueError(f"{found.file} lacks {name}; give a head of {layout}")
    tensors, own = dict(found.tensors), shape(found.config, found.file)
    spoken, whole = len(tensors["lm_head.weight"]), own["vocab_size"]
    if "t2d" in tensors:
        whole = own["vocab_size"] = len(tensors["t2d"])
    elif "d2t" in tensors and spoken < whole:
        tensors["t2d"] = _mask(tensors["d2t"], whole)
    if spoken == whole:  # the maps say nothing then
        tensors.pop("t2d", None)
        tensors.pop("d2t", None)
    wide = found.config.get("target_hidden_size")
    own |= {} if wide in (None, own["hidden_size"]) else {"visual_slots": "placeholder"}
    config = Eagle3HeadConfig(
        **own,
        draft_vocab_size=None if spoken == whole else spoken,
        target_hidden_size=None if wide == own["hidden_size"] else wide,
        tapped_layers=None if taps is None else list(taps),
        num_taps=3 if taps is None else len(taps),
        attention_bias="midlayer.self_attn.q_proj.bias" in tensors,
    )
    ignored = () if config.target_hidden_size else IGNORED
    kept = PublishedHead(found.config, tensors, found.file)
    head: Eagle3Head = filled(
        lambda: Eagle3Head(config), kept, layout, ignored, (r"midlayer\.self_attn\.o_proj\.bias",)
    )
    head.check()
    return head


def _mask(offsets: Any, size: int) -> Any:  # (V',) -> (V,) bool
    """Which tokens a map leads to; those out of range are left for the head's own check."""
    ids = offsets.new_tensor(range(len(offsets))) + offsets
    found = offsets.new_zeros(size, dtype=bool)
    found[ids[(ids >= 0) & (ids < size)]] = True
    return found


def written(head: Any, layout: str, ids: Sequence[int] | None) -> PublishedHead:
    """The head in the flat form, with a list of layers where one is given."""
    plain = {**PLAIN, "visual_slots": "placeholder"} if head_is_wide(head) else PLAIN
    check_head(head, Eagle3Head, layout, plain)
    config, tensors = head.config, own_tensors(head)
    if config.attention_bias and bool(tensors.pop("midlayer.self_attn.o_proj.bias").any()):
        raise ValueError(
            "midlayer.self_attn.o_proj.bias of this head is not zero, and engines read no such "
            "bias; train a head with attention_bias=False"
        )
    size = config.draft_vocab_size or config.vocab_size
    made = {**llama(config, "LlamaForCausalLMEagle3"), "draft_vocab_size": size}
    if config.target_hidden_size:
        made["target_hidden_size"] = config.target_hidden_size
    if ids is not None:
        made["eagle_config"] = {IDS: list(ids), "use_aux_hidden_state": True}
    return PublishedHead(made, tensors)


def head_is_wide(head: Any) -> bool:
    """Whether it has another width than its target, and so a table of its own."""
    return isinstance(head, Eagle3Head) and head.embeddings is not None


def export(head: Any, target: str | None) -> PublishedHead:
    """The head as the authors' code reads it. Raises ValueError for layers of its own choice."""
    check_head(head, Eagle3Head, "eagle-3", {"tapped_layers": None, "positions": "keep"})
    return written(head, "eagle-3", None)


FORMAT = head_format(
    "EAGLE-3 (Li et al. 2025): heads on three layers, words of their own.", convert, export
)
