"""CSpD as released: a small MAR drafts continuous tokens, and their last Gaussians decide. Lossy.

Wang et al. 2024, "Continuous speculative decoding for autoregressive image generation" (arXiv
2411.11925). The target takes the first steps alone (`prefill`), then a small model drafts up to the
next multiple of `length` under the target's own noise; one pass of the target, which does not read
the draft, judges all its cells by a tempered density ratio. Lossy: `mmspec.verifiers.
released_ratio` lists where the public code departs from its theory; `tau`, `factor`, `tries` and
`fallback` are its settings. Every block costs one pass, as it would if the target itself took
fewer, wider steps. For an exact variant see the recipe "cspd-coupled".
"""

from mmspec.draft import Verifier
from mmspec.drafters.denoising.patches import SMALL_MAR, aligned_to_milestones
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Deferred, Kit, Recipe
from mmspec.verifiers.released_ratio import ReleasedRatio


def released_rule(kit: Kit) -> Verifier:
    """The rule with the settings of this kit."""
    named = ("tau", "factor", "tries", "fallback")
    return ReleasedRatio(**{name: kit.options[name] for name in named})


RECIPE = Recipe(
    architecture=aligned_to_milestones,
    execution=Chain(Fixed(8)),
    verifier=Deferred(
        released_rule,
        "ReleasedRatio, tempered Gaussians of the last steps",
        kinds=ReleasedRatio.kinds,
    ),
    optimisation="trajectory alignment, pre-filling",
    draft_model=(SMALL_MAR,),
    options={"prefill": 0.15, "tau": 42.0, "factor": "code", "tries": 100, "fallback": False},
    paper="Wang et al. 2024",
    decodes="patches",
)
