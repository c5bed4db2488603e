"""HSD: the text of an OCR pipeline is the draft of a model that reads the same page.

Liao et al. 2026, hierarchical speculative decoding for document parsing. The text comes with the
call: `generate(..., drafter_inputs={"draft": [text, ...]})`, one per row, in the tokens of the
target (its tokenizer is read from its folder, or given as `processor=`); `draft_file=` is the text
of calls that bring none. It is copied from where the last `window` tokens stand in it; without a
text, or where it has nothing to do with the answer, decoding is plain. Regions of a page are rows
of a batch, and what they become is the draft of the page: `parse_page` of the module
`mmspec.modalities.vlm.documents`. Exact; with a tolerance of edits it is `hsd-tolerance`.
"""

from mmspec.drafters.growth import Chain
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.lookup.given_text import given_text
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=given_text,
    execution=Chain(Fixed(16)),
    verifier=Coupled(),
    options={"window": 3, "processor": None, "draft_file": None},
    paper="Liao et al. 2026",
    reconstructed="window, draft length, how the text is taken up again behind a difference",
)
