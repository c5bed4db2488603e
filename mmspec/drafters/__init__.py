"""Where drafts come from, one source per file."""

from mmspec.drafters.ensemble import Ensemble
from mmspec.drafters.massv import Projector
from mmspec.drafters.oracle import Oracle, Random
from mmspec.drafters.prompt_lookup import PromptLookup
from mmspec.drafters.shared import SharedBackbone
from mmspec.drafters.suffix import SuffixAutomaton
from mmspec.drafters.token_recycling import TokenRecycling

__all__ = [
    "Ensemble",
    "Oracle",
    "Projector",
    "PromptLookup",
    "Random",
    "SharedBackbone",
    "SuffixAutomaton",
    "TokenRecycling",
]
