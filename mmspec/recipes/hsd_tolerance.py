"""HSD with tolerance: spans of a given text are accepted within a few edits of the target's output.

Liao et al. 2026, with the drafts of `hsd`. A prefix of the draft is accepted while its edit
distance to the target's output stays below a share `tau` of its tokens. Lossy; `tau=0` is `hsd`.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.lookup.given_text import given_text
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Deferred, Recipe
from mmspec.verifiers.edit_tolerance import EditTolerance, build_edit_tolerance

RECIPE = Recipe(
    architecture=given_text,
    execution=Chain(Fixed(16)),
    verifier=Deferred(
        build_edit_tolerance, "longest beginning within a share of edits", kinds=EditTolerance.kinds
    ),
    options={"window": 3, "processor": None, "draft_file": None, "tau": 0.1},
    least={"window": 1},
    idle_without="draft_file",
    paper="Liao et al. 2026",
    reconstructed="tau and its unit: edits per token, without the paper's canonical form of texts",
)
