"""HIPPO: a pruned small model drafts beside the target; tokens are kept by three scores.

Lv et al. 2026 (arXiv 2601.08273). Relevance to the question, novelty against the frame before and
complexity of the place, equally weighted, keep a tenth of the visual tokens. Drafting goes on while
the target verifies: one token behind a rejection (conservative), else a window (optimistic). Exact;
verified with coupled noise. Reconstructed: the scores' boundary, window and weights, and a draft of
4. Drafters that see no picture draft without it.
"""

from mmspec.compressors.holistic import Holistic
from mmspec.drafters.neural.ahead import with_windows_ahead
from mmspec.verifiers.coupled import Coupled

RECIPE = with_windows_ahead(
    4,
    Coupled(),
    refill=0,
    compressor=Holistic(keep=0.1),
    optimisation="a tenth of the visual tokens, by three scores; windows drafted ahead",
    paper="Lv et al. 2026",
    reconstructed="boundary, window and weights of the scores; draft length",
)
