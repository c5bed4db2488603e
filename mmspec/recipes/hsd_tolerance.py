"""HSD with tolerance: spans of a given text pass that are a few edits from the target's own.

Liao et al. 2026, as `hsd`, whose drafts these are. A beginning of the draft is kept while the edits
between it and what the target says stay below a share `tau` of its tokens. Lossy; `tau=0` is `hsd`.
"""

from mmspec.drafters.growth import Chain
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.lookup.given_text import given_text
from mmspec.recipe import Deferred, Recipe
from mmspec.verifiers.edit_tolerance import EditTolerance, edit_tolerance

RECIPE = Recipe(
    architecture=given_text,
    execution=Chain(Fixed(16)),
    verifier=Deferred(
        edit_tolerance, "longest beginning within a share of edits", kinds=EditTolerance.kinds
    ),
    options={"window": 3, "processor": None, "draft_file": None, "tau": 0.1},
    paper="Liao et al. 2026",
    reconstructed="tau and its unit: edits per token, without the paper's canonical form of texts",
)
