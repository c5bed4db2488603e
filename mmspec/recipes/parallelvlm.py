"""ParallelVLM: a small model on unbiasedly pruned tokens drafts while the target verifies.

Kong et al. 2026 (arXiv 2603.19610). A tenth of the visual tokens is kept, those that approach the
question in the target's early layers; without attention scores there is no bias to the ends of a
clip. A window is as long as the draft model needs for one target forward (`length=`), and after a
rejection one is drafted while the target waits. Exact; verified with coupled noise. Reconstructed:
which layers are early. The draft model's prefill follows the target's, whose states it needs; the
paper overlaps both. Drafters without image input draft without it.
"""

from mmspec.compressors.uv_prune import UvPrune
from mmspec.drafters.neural.pipelined import with_pipelined_windows
from mmspec.verifiers.coupled import Coupled

RECIPE = with_pipelined_windows(
    5,
    Coupled(),
    refill=None,
    compressor=UvPrune(keep=0.1),
    optimisation="a tenth of the visual tokens, by their gain in early layers; windows ahead",
    paper="Kong et al. 2026",
    reconstructed="early layers; the draft model's prefill stands behind the target's",
)
