"""EAGLE-3 heads as AngelSlim publishes them: SGLang's way to list layers, M-RoPE for Qwen-VL."""

from __future__ import annotations

from mmspec.formats.head_files import head_format
from mmspec.formats.sglang import convert, export

FORMAT = head_format(
    "EAGLE-3 of AngelSlim: listed layers are those that states leave.", convert, export
)
