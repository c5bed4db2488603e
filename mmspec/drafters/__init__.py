"""Where drafts come from, one source per file."""

from typing import TYPE_CHECKING

from mmspec._lazy import lazy

if TYPE_CHECKING:
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
    from mmspec.drafters.oracle import Oracle, RandomDrafter

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
    "RandomDrafter",
    "SharedBackbone",
    "SuffixAutomaton",
    "TokenRecycling",
]

_HOMES = {
    "Ensemble": "mmspec.drafters.neural.ensemble",
    "Extrapolated": "mmspec.drafters.denoising.extrapolated",
    "Frozen": "mmspec.drafters.denoising.frozen",
    "Independent": "mmspec.drafters.denoising.small_denoiser",
    "Jacobi": "mmspec.drafters.jacobi.carry_over",
    "Oracle": "mmspec.drafters.oracle",
    "Picard": "mmspec.drafters.denoising.picard",
    "Projector": "mmspec.drafters.neural.massv",
    "PromptLookup": "mmspec.drafters.lookup.prompt_lookup",
    "RandomDrafter": "mmspec.drafters.oracle",
    "SharedBackbone": "mmspec.drafters.neural.shared",
    "SuffixAutomaton": "mmspec.drafters.lookup.suffix",
    "TokenRecycling": "mmspec.drafters.lookup.token_recycling",
}

if not TYPE_CHECKING:  # a type checker reads the imports above, and so sees misspelt names
    __getattr__, __dir__ = lazy(__name__, _HOMES)
