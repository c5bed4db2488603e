"""HIPPO: a small model on tokens pruned by three scores drafts in parallel with the target.

Lv et al. 2026 (arXiv 2601.08273). Relevance to the question, novelty against the previous frame and
local complexity, equally weighted, select a tenth of the visual tokens. Drafting goes on while the
target verifies: one token after a rejection (conservative), else a window (optimistic). Exact;
verified with coupled noise. Reconstructed: the scores' boundary, window and weights, and a draft of
4. Drafters without image input draft without it.
"""

from mmspec.compressors.holistic import Holistic
from mmspec.drafters.neural.pipelined import with_pipelined_windows
from mmspec.verifiers.coupled import Coupled

RECIPE = with_pipelined_windows(
    4,
    Coupled(),
    refill=0,
    compressor=Holistic(keep=0.1),
    optimisation="a tenth of the visual tokens, by three scores; windows drafted ahead",
    paper="Lv et al. 2026",
    reconstructed="boundary, window and weights of the scores; draft length",
)
