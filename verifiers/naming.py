"""Verifiers by name, for command lines and `accelerate(verifier="...")`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mmspec.draft import Verifier
from mmspec.verifiers.block import Block
from mmspec.verifiers.coupled import Coupled
from mmspec.verifiers.greedy_multidraft import GreedyMultiDraft
from mmspec.verifiers.kseq import KSeq
from mmspec.verifiers.recursive import Recursive
from mmspec.verifiers.sample_and_match import SampleAndMatch
from mmspec.verifiers.spechub import SpecHub
from mmspec.verifiers.traversal import Traversal

VERIFIERS: Mapping[str, Callable[[], Verifier]] = {
    "coupled": Coupled,
    "rejection": Recursive,
    "block": Block,
    "traversal": Traversal,
    "sample-and-match": SampleAndMatch,
    "greedy-multi-draft": GreedyMultiDraft,
    "spechub": SpecHub,
    "k-seq": KSeq,
}


def named(name: str) -> Verifier:
    """The verifier of that name, with its default settings.

    Raises ValueError listing the known ones.
    """
    if name not in VERIFIERS:
        known = ", ".join(sorted(VERIFIERS))
        raise ValueError(f"there is no verifier {name!r}; known: {known}, or pass an object")
    return VERIFIERS[name]()
