"""HSD: the text of an OCR pipeline is the draft for a model that reads the same page.

Liao et al. 2026, hierarchical speculative decoding for document parsing. The text comes with the
call: `generate(..., drafter_inputs={"draft": [text, ...]})`, one per row, in the tokens of the
target (its tokenizer is read from its folder, or given as `processor=`); `draft_file=` is the
default text. It is copied from the position where the last `window` tokens match; without a text or
a match, decoding is plain. Regions of a page are rows of a batch, and their outputs are the draft
of the page: `parse_page` of the module `mmspec.modalities.vlm.documents`. Exact; with a tolerance
of edits it is `hsd-tolerance`.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.lookup.given_text import given_text
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=given_text,
    execution=Chain(Fixed(16)),
    verifier=Coupled(),
    options={"window": 3, "processor": None, "draft_file": None},
    least={"window": 1},
    idle_without="draft_file",
    paper="Liao et al. 2026",
    reconstructed="window, draft length, how the text is taken up again behind a difference",
)
