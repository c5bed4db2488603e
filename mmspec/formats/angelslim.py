"""EAGLE-3 heads as AngelSlim publishes them: SGLang's way to list layers, M-RoPE for Qwen-VL."""

from __future__ import annotations

from mmspec.formats import Format
from mmspec.formats.head_files import FILES
from mmspec.formats.sglang import convert, export

FORMAT = Format(
    about="EAGLE-3 of AngelSlim: listed layers are those that states leave.",
    files=FILES,
    convert=convert,
    export=export,
)
