"""EAGLE-3 heads as published (Li et al. 2025), and the shared code of its variants.

All variants use one set of weight names. They differ in

- layer id l in the configuration: the input of layer l (vLLM, speculators), which is hidden state l
  in Hugging Face's order, or its output (SGLang, SpecForge, AngelSlim), hidden state l + 1. The
  authors' own heads list no layers and tap 2, L // 2 and L - 3.
- `norm_output`: in vLLM and speculators the next state is normed, False by default; in SpecForge
  the output head reads a normed state, True by default, which all others do, too.
- what a configuration can express, see `Dialect`.

Engines and trainers embed the placeholder token at image slots: `visual_slots="placeholder"`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    rename_prefix,
)
from mmspec.models.compatibility import AFTER_NORM, check_exports_taps
from mmspec.models.heads.eagle3 import Eagle3Head, Eagle3HeadConfig, FusedStateHead
from mmspec.models.llama_layers import SLIDING

IDS = "eagle_aux_hidden_state_layer_ids"
IGNORED = (r"embed_tokens\.weight",)
VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_PLAIN = {
    **{"num_steps": 0, "num_taps": 3, "visual_keep": 1.0},
    **dict.fromkeys((*VARIANTS, "qk_norm"), False),
    **{"num_hidden_layers": 1, "sliding_window": None, "attention_bias": False},
}


@dataclass(frozen=True)
class Dialect:
    """What a variant of the format can express beyond the authors' own heads."""

    name: str
    can_express: frozenset[str] = frozenset()  # fields of `Eagle3HeadConfig`
    is_norm_output_of_logits: bool = False  # SpecForge's meaning of `norm_output`


AUTHORS = Dialect("eagle-3")


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
    if "norm_output" in found.config:
        raise ValueError(
            f"the configuration of {found.file} has norm_output={found.config['norm_output']}, "
            "which is the norm of the next state in vLLM, and that of the output head in "
            "SpecForge; convert it by format vllm or sglang"
        )
    head: Eagle3Head = build_eagle3_head(found, None, AUTHORS)
    return head


def listed_layers(config: Mapping[str, Any]) -> list[int] | None:
    """Return the layer ids in a flat configuration, None where it has none."""
    nested = config.get("eagle_config") or {}
    ids = nested.get(IDS) or config.get(IDS)
    return None if ids is None else [int(one) for one in ids]


def build_eagle3_head(
    found: PublishedHead,
    taps: Sequence[int] | None,
    dialect: Dialect,
    maker: Any = Eagle3Head,
    **more: Any,
) -> Any:
    """Build a head from weights of the shared names; `taps` are Hugging Face hidden state indices.

    `maker` is the class of the head, `more` are further fields of its configuration. Raises
    ValueError for a vocabulary map that is out of range or inconsistent, and for settings that the
    dialect does not have.
    """
    tensors = rename_prefix(found.tensors, "layers.0.", "midlayer.")
    for name in ("lm_head.weight", "fc.weight"):
        if name not in tensors:
            raise ValueError(f"{found.file} lacks {name}; give a head of EAGLE-3")
    own = read_sizes(found.config, found.file)
    draft_size, size = len(tensors["lm_head.weight"]), own["vocab_size"]
    if "t2d" in tensors:
        size = own["vocab_size"] = len(tensors["t2d"])
    elif "d2t" in tensors:
        tensors["t2d"] = mark_tokens(tensors["d2t"], size)
    if draft_size == size:  # identity maps
        tensors.pop("t2d", None)
        tensors.pop("d2t", None)
    wide = found.config.get("target_hidden_size")
    config: Eagle3HeadConfig = maker.config_class(
        **own,
        **_read_variants(found, dialect),
        num_hidden_layers=count_layers(tensors, found, extra=1),
        draft_vocab_size=None if draft_size == size else draft_size,
        target_hidden_size=None if wide == own["hidden_size"] else wide,
        tapped_layers=None if taps is None else list(taps),
        num_taps=3 if taps is None else len(taps),
        attention_bias="midlayer.self_attn.q_proj.bias" in tensors,
        qk_norm="midlayer.self_attn.q_norm.weight" in tensors,
        visual_slots="placeholder",
        **more,
    )
    if taps is not None:
        setattr(config, AFTER_NORM, False)
    ignored = () if config.has_embeddings else IGNORED
    published = PublishedHead(found.config, tensors, found.file)
    head = build_head(
        lambda: maker(config),
        published,
        "EAGLE-3",
        ignored,
        (r".*\.self_attn\.o_proj\.bias",),
    )
    head.check()
    return head


def _read_variants(found: PublishedHead, dialect: Dialect) -> dict[str, Any]:
    """Norms and windows of a configuration. Raises ValueError for those its dialect lacks."""
    config = {**found.config, **(found.config.get("eagle_config") or {})}
    own = {name: bool(config.get(name, False)) for name in VARIANTS}
    if dialect.is_norm_output_of_logits:
        check_values(config, {"norm_output": True}, found.file)
        own["norm_output"] = False
    lacking = {name: False for name in VARIANTS if name not in dialect.can_express}
    check_values(own, lacking, found.file)
    is_used = config.get("sliding_window") and config.get("use_sliding_window", True)
    is_known = "sliding_window" in dialect.can_express
    if is_known and is_used and SLIDING in (config.get("layer_types") or ()):
        own |= {name: config[name] for name in ("sliding_window", "layer_types")}
    return own


def to_published(head: Any, dialect: Dialect, ids: Sequence[int] | None) -> PublishedHead:
    """Return the flat configuration and the weights; with `ids`, the configuration lists layers.

    Raises ValueError for another kind of head, and for settings that the dialect cannot express.
    """
    plain = {name: only for name, only in _PLAIN.items() if name not in dialect.can_express}
    check_head(head, FusedStateHead, dialect.name, {})
    if head.config.visual_slots != "placeholder":
        raise ValueError(
            f"this head reads image slots with visual_slots={head.config.visual_slots!r}, but "
            "engines embed the placeholder token there, which would change its drafts; train it "
            "with visual_slots=placeholder, or set that in its config.json if its target reads no "
            "images"
        )
    check_head(head, FusedStateHead, dialect.name, plain)
    check_exports_taps(head.config)
    config, tensors = head.config, copy_tensors(head)
    size = config.draft_vocab_size or config.vocab_size
    kind = "Eagle3Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLMEagle3"
    made = {**llama_config(config, kind), "draft_vocab_size": size}
    if config.qk_norm:
        made["model_type"] = "qwen3"
    if config.target_hidden_size:
        made["target_hidden_size"] = config.target_hidden_size
    if ids is not None:
        made["eagle_config"] = {IDS: list(ids), "use_aux_hidden_state": True}
    made |= {name: getattr(config, name) for name in VARIANTS if name in dialect.can_express}
    if dialect.is_norm_output_of_logits:
        made["norm_output"] = True
    return PublishedHead(made, tensors)


def export(head: Any, target: str | None) -> PublishedHead:
    """Export a head for the authors' code. Raises ValueError for non-default tapped layers."""
    check_head(head, Eagle3Head, "eagle-3", {"tapped_layers": None, "positions": "keep"})
    return to_published(head, AUTHORS, None)


FORMAT = head_format(
    "EAGLE-3 (Li et al. 2025): heads on three layers with a draft vocabulary.", convert, export
)
