"""Where drafts come from, one source per file."""

from mmspec.drafters.denoiser import Independent
from mmspec.drafters.ensemble import Ensemble
from mmspec.drafters.extrapolated import Extrapolated
from mmspec.drafters.frozen import Frozen
from mmspec.drafters.jacobi import Jacobi
from mmspec.drafters.massv import Projector
from mmspec.drafters.oracle import Oracle, Random
from mmspec.drafters.picard import Picard
from mmspec.drafters.prompt_lookup import PromptLookup
from mmspec.drafters.shared import SharedBackbone
from mmspec.drafters.suffix import SuffixAutomaton
from mmspec.drafters.token_recycling import TokenRecycling

__all__ = [
    "Ensemble",
    "Extrapolated",
    "Frozen",
    "Independent",
    "Jacobi",
    "Oracle",
    "Picard",
    "Projector",
    "PromptLookup",
    "Random",
    "SharedBackbone",
    "SuffixAutomaton",
    "TokenRecycling",
]
