"""Verifiers: what becomes of a draft once the target has scored it. One rule or walk per file."""

from typing import TYPE_CHECKING

from mmspec._lazy import lazy

if TYPE_CHECKING:
    from mmspec.draft import Rule, RuleSchedule, Verifier
    from mmspec.verifiers.annealed import Annealed
    from mmspec.verifiers.block import Block
    from mmspec.verifiers.coupled import Coupled
    from mmspec.verifiers.exact import Exact
    from mmspec.verifiers.greedy_multidraft import GreedyMultiDraft
    from mmspec.verifiers.grouped import Grouped, RankWindow
    from mmspec.verifiers.kseq import KSeq
    from mmspec.verifiers.latent_neighbourhood import LatentNeighbourhood
    from mmspec.verifiers.lenience import Lenience
    from mmspec.verifiers.longest import Longest
    from mmspec.verifiers.neighbourhood_threshold import NeighbourhoodThreshold
    from mmspec.verifiers.recursive import Recursive
    from mmspec.verifiers.sample_and_match import SampleAndMatch
    from mmspec.verifiers.spechub import SpecHub
    from mmspec.verifiers.traversal import Traversal
    from mmspec.verifiers.typical import Typical

__all__ = [
    "Annealed",
    "Block",
    "Coupled",
    "Exact",
    "GreedyMultiDraft",
    "Grouped",
    "KSeq",
    "LatentNeighbourhood",
    "Lenience",
    "Longest",
    "NeighbourhoodThreshold",
    "RankWindow",
    "Recursive",
    "Rule",
    "RuleSchedule",
    "SampleAndMatch",
    "SpecHub",
    "Traversal",
    "Typical",
    "Verifier",
]

_HOMES = {
    "Annealed": "mmspec.verifiers.annealed",
    "Block": "mmspec.verifiers.block",
    "Coupled": "mmspec.verifiers.coupled",
    "Exact": "mmspec.verifiers.exact",
    "GreedyMultiDraft": "mmspec.verifiers.greedy_multidraft",
    "Grouped": "mmspec.verifiers.grouped",
    "KSeq": "mmspec.verifiers.kseq",
    "LatentNeighbourhood": "mmspec.verifiers.latent_neighbourhood",
    "Lenience": "mmspec.verifiers.lenience",
    "Longest": "mmspec.verifiers.longest",
    "NeighbourhoodThreshold": "mmspec.verifiers.neighbourhood_threshold",
    "RankWindow": "mmspec.verifiers.grouped",
    "Recursive": "mmspec.verifiers.recursive",
    "Rule": "mmspec.draft",
    "RuleSchedule": "mmspec.draft",
    "SampleAndMatch": "mmspec.verifiers.sample_and_match",
    "SpecHub": "mmspec.verifiers.spechub",
    "Traversal": "mmspec.verifiers.traversal",
    "Typical": "mmspec.verifiers.typical",
    "Verifier": "mmspec.draft",
}

if not TYPE_CHECKING:  # a type checker reads the imports above, and so sees misspelt names
    __getattr__, __dir__ = lazy(__name__, _HOMES)
