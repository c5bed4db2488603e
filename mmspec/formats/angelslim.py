"""EAGLE-3 heads of AngelSlim: layers listed as in SGLang, M-RoPE for Qwen-VL."""

from __future__ import annotations

from mmspec.formats.head_files import head_format
from mmspec.formats.sglang import convert, export

FORMAT = head_format(
    "EAGLE-3 of AngelSlim: lists the layers whose outputs are fused.", convert, export
)
