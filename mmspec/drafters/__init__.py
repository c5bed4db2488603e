"""Where drafts come from, one source per file."""

from mmspec.drafters.denoising.extrapolated import Extrapolated
from mmspec.drafters.denoising.frozen import Frozen
from mmspec.drafters.denoising.picard import Picard
from mmspec.drafters.denoising.small_denoiser import Independent
from mmspec.drafters.jacobi.carry_over import Jacobi
from mmspec.drafters.lookup.prompt_lookup import PromptLookup
from mmspec.drafters.lookup.suffix import SuffixAutomaton
from mmspec.drafters.lookup.token_recycling import TokenRecycling
from mmspec.drafters.neural.ensemble import Ensemble
from mmspec.drafters.neural.massv import Projector
from mmspec.drafters.neural.shared import SharedBackbone
from mmspec.drafters.oracle import Oracle, Random

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
