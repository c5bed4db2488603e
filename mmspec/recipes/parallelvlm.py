"""ParallelVLM: a small model on unbiasedly pruned tokens drafts while the target verifies.

Kong et al. 2026 (arXiv 2603.19610). Visual tokens are kept, a tenth of them, that draw nearer to
the question in the target's early layers: no attention, so no bias to the ends of a clip. A window
is as long as the draft model needs for one target forward (`length=`), and behind a rejection one
is drafted while the target waits. Exact; verified with coupled noise. Reconstructed: which layers
are early. The draft model's prefill begins behind the target's here, because it needs what that
says, where the paper overlaps both. Drafters that see no picture draft without it.
"""

from mmspec.compressors.uv_prune import UvPrune
from mmspec.drafters.neural.ahead import with_windows_ahead
from mmspec.verifiers.coupled import Coupled

RECIPE = with_windows_ahead(
    5,
    Coupled(),
    refill=None,
    compressor=UvPrune(keep=0.1),
    optimisation="a tenth of the visual tokens, by their gain in early layers; windows ahead",
    paper="Kong et al. 2026",
    reconstructed="early layers; the draft model's prefill stands behind the target's",
)
