"""Judge decoding: a head on the target's states accepts drafted tokens that do no harm.

Bachmann et al. 2025; the labels of `mmspec train judge` are those of AutoJudge (Garipov et al.
2025): a refused token is harmless if the answer that continues from it ends as the target's own.
`judge` is a `JudgeHead` of mmspec.verifiers.judge or its file, `threshold` replaces its own.
Without one, speculative sampling. Lossy; runs report an estimate of the bias. Reconstructed: every
refused token is judged alone, and the head reads the target's state only.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.feature_head import with_draft_model
from mmspec.drafters.shapes import Chain
from mmspec.verifiers.judge import JUDGED

RECIPE = with_draft_model(
    execution=Chain(Fixed(8)),
    verifier=JUDGED,
    options={"judge": None, "threshold": None},
    paper="Bachmann et al. 2025; Garipov et al. 2025",
    reconstructed="every refused token is judged alone, by the target's state only",
)
