"""Verifiers: what becomes of a draft once the target has scored it. One rule or walk per file.

Here they are by name, for command lines and `accelerate(verifier="...")`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmspec.draft import Verifier

VERIFIERS: Mapping[str, tuple[str, str]] = {  # file and class; loaded when asked for
    "coupled": ("coupled", "Coupled"),
    "rejection": ("recursive", "Recursive"),
    "block": ("block", "Block"),
    "traversal": ("traversal", "Traversal"),
    "sample-and-match": ("sample_and_match", "SampleAndMatch"),
    "greedy-multi-draft": ("greedy_multidraft", "GreedyMultiDraft"),
    "spechub": ("spechub", "SpecHub"),
    "k-seq": ("kseq", "KSeq"),
    "multi-draw": ("multi_draw", "MultiDraw"),
}


def named(name: str) -> Verifier:
    """The verifier of that name, with its default settings.

    Raises ValueError listing the known ones.
    """
    if name not in VERIFIERS:
        known = ", ".join(sorted(VERIFIERS))
        raise ValueError(f"there is no verifier {name!r}; known: {known}, or pass an object")
    file, maker = VERIFIERS[name]
    verifier: Verifier = getattr(import_module(f"mmspec.verifiers.{file}"), maker)()
    return verifier
