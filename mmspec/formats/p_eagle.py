"""P-EAGLE heads in the flat layout that vLLM reads: EAGLE-3 with a mask token and `mask_hidden`.

Layer ids mean the inputs of layers, as in format `vllm`. Served with `parallel_drafting: true`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.formats.eagle_3 import build_eagle3_head, listed_layers
from mmspec.formats.head_files import PublishedHead, check_head, head_format, open_head
from mmspec.formats.vllm import VLLM, export_ordered
from mmspec.models.heads.p_eagle import PEagleHead

TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")  # in the order of vLLM
HIDDEN = "mask_hidden"


def convert(files: Sequence[Path], options: Mapping[str, Any]) -> PEagleHead:
    """Convert the head in a folder.

    Raises ValueError without a mask token, and for a number of depths that is no whole number.
    """
    found = open_head(files)
    token = next(
        (found.config[name] for name in TOKENS if found.config.get(name) is not None), None
    )
    more = {name: _read_depths(value) for name, value in options.items()}
    return build_p_eagle_head(found, listed_layers(found.config), token, **more)


def _read_depths(value: Any) -> int:
    if not str(value).isdigit():
        raise ValueError(f"num_depths={value!r} is not a number of tokens; give 8, for example")
    return int(value)


def build_p_eagle_head(
    found: PublishedHead, taps: Sequence[int] | None, token: int | None, **more: Any
) -> PEagleHead:
    """Build a head from weights of EAGLE-3's names and `mask_hidden`.

    `taps` are Hugging Face hidden state indices. Raises ValueError as `build_eagle3_head`, and
    without a mask token.
    """
    if token is None:
        raise ValueError(
            f"the configuration of {found.file} has none of {', '.join(TOKENS)}; give a head of "
            "P-EAGLE, or copy it again"
        )
    if HIDDEN not in found.tensors:
        raise ValueError(f"{found.file} lacks {HIDDEN}; give a head of P-EAGLE")
    tensors = {**found.tensors, HIDDEN: found.tensors[HIDDEN].reshape(1, 1, -1)}
    head: PEagleHead = build_eagle3_head(
        PublishedHead(found.config, tensors, found.file),
        taps,
        VLLM,
        PEagleHead,
        mask_token_id=int(token),
        own_embeddings="embed_tokens.weight" in tensors,
        **more,
    )
    return head


def export(head: Any, target: str | None) -> PublishedHead:
    """Export a head with vLLM's layer ids; it embeds the target's tokens without a table."""
    check_head(head, PEagleHead, "p-eagle", {})
    made = export_ordered(head)
    return PublishedHead({**made.config, "ptd_token_id": head.config.mask_token_id}, made.tensors)


FORMAT = head_format(
    "P-EAGLE (Hui et al. 2026) of vLLM: EAGLE-3 with a mask token and a learned state.",
    convert,
    export,
    num_depths="tokens that it was trained to draft at once; 8 by default",
)
