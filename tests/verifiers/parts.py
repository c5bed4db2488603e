"""Rules and verifiers that the tests run over."""

from __future__ import annotations

from mmspec.draft import Rule, RuleSchedule, Verifier
from mmspec.verifiers.additive_tolerance import AdditiveTolerance
from mmspec.verifiers.annealed import Annealed
from mmspec.verifiers.block import Block
from mmspec.verifiers.confidence_floor import ConfidenceFloor
from mmspec.verifiers.coupled import Coupled
from mmspec.verifiers.exact import Exact
from mmspec.verifiers.greedy_multidraft import GreedyMultiDraft
from mmspec.verifiers.grouped import Grouped, RankWindow
from mmspec.verifiers.kseq import KSeq
from mmspec.verifiers.lenience import Lenience
from mmspec.verifiers.likelihood_floor import LikelihoodFloor
from mmspec.verifiers.longest import Longest
from mmspec.verifiers.multi_draw import MultiDraw
from mmspec.verifiers.rank_limit import RankLimit
from mmspec.verifiers.recursive import Recursive
from mmspec.verifiers.sample_and_match import SampleAndMatch
from mmspec.verifiers.spechub import SpecHub
from mmspec.verifiers.traversal import Traversal
from mmspec.verifiers.typical import Typical

RULES: tuple[Rule | RuleSchedule, ...] = (
    Exact(),
    Lenience(ell=0.8),
    Typical(epsilon=0.09, delta=0.3),
    Annealed(delta=1.5),
    Grouped(RankWindow(size=4)),
    AdditiveTolerance(beta=0.1, exempt=(0,)),
    RankLimit(ranks=2),
    LikelihoodFloor(floor=0.2),
    ConfidenceFloor(floor=0.4),
)

ALL: tuple[Verifier, ...] = (
    Coupled(),
    SampleAndMatch(),
    Block(),
    Traversal(),
    GreedyMultiDraft(),
    SpecHub(),
    KSeq(),
    MultiDraw(draws=1),
    MultiDraw(draws=3),
    Longest(Typical(epsilon=0.09, delta=0.3)),
    *(Recursive(rule) for rule in RULES),
)
