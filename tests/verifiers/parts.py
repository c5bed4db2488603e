"""Rules and verifiers that the tests run over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmspec import verifiers
from mmspec.draft import Rule, RuleSchedule, Verifier
from mmspec.verifiers.additive_tolerance import AdditiveTolerance
from mmspec.verifiers.annealed import Annealed
from mmspec.verifiers.block import Block
from mmspec.verifiers.cascade import Cascade, Chow, Difference, TokenCascade
from mmspec.verifiers.confidence_floor import ConfidenceFloor
from mmspec.verifiers.coupled import Coupled
from mmspec.verifiers.fuzzy import Fuzzy
from mmspec.verifiers.greedy_multidraft import GreedyMultiDraft
from mmspec.verifiers.grouped import Grouped, RankWindow
from mmspec.verifiers.kseq import KSeq
from mmspec.verifiers.lenience import Lenience
from mmspec.verifiers.longest import Longest
from mmspec.verifiers.multi_draw import MultiDraw
from mmspec.verifiers.rank_gap import RankGap
from mmspec.verifiers.rank_limit import RankLimit
from mmspec.verifiers.recursive import Recursive
from mmspec.verifiers.rollback import Rollback
from mmspec.verifiers.sample_and_match import SampleAndMatch
from mmspec.verifiers.spechub import SpecHub
from mmspec.verifiers.traversal import Traversal
from mmspec.verifiers.two_step import TwoStep
from mmspec.verifiers.typical import Typical

SETTINGS: Mapping[type, tuple[Any, ...]] = {  # rules without defaults, and those tested with others
    Lenience: (Lenience(ell=0.8),),
    Typical: (Typical(epsilon=0.09, delta=0.3),),
    Annealed: (Annealed(delta=1.5),),
    Grouped: (Grouped(RankWindow(size=4)),),
    AdditiveTolerance: (AdditiveTolerance(beta=0.1, exempt=(0,)),),
    RankLimit: (RankLimit(ranks=2),),
    ConfidenceFloor: (ConfidenceFloor(floor=0.4),),
    Cascade: (Cascade(), Cascade(Chow(0.4)), Cascade(Difference(0.0))),
    TokenCascade: (TokenCascade(alpha=0.4),),
    Fuzzy: (Fuzzy(threshold=0.1), Fuzzy(0.3, "kl")),
    RankGap: (RankGap(ranks=3, gap=1.0),),
    Rollback: (Rollback(limit=1.0),),
}


def _find_rules() -> tuple[Rule | RuleSchedule, ...]:
    """One or more of every rule of the folder that needs no model."""
    found: list[Any] = []
    for name in verifiers.names():
        made = verifiers.parse_verifier(name)
        if isinstance(made, Recursive) and verifiers.FILES.get(name) is None:
            found += SETTINGS.get(type(made.rule), (made.rule,))
    given = {type(rule) for rule in found}
    found += [rule for kind, rules in SETTINGS.items() if kind not in given for rule in rules]
    return tuple(found)


RULES = _find_rules()

ALL: tuple[Verifier, ...] = (
    Coupled(),
    SampleAndMatch(),
    Block(),
    Traversal(),
    GreedyMultiDraft(),
    SpecHub(),
    TwoStep(),
    KSeq(),
    MultiDraw(draws=1),
    MultiDraw(draws=3),
    Longest(Typical(epsilon=0.09, delta=0.3)),
    *(Recursive(rule) for rule in RULES),
)
