"""Native MTP: the draft head that the target's own checkpoint contains drafts a chain.

DeepSeek-AI 2024, "DeepSeek-V3 technical report", sections 2.2 and 5.4.3; Qwen3-Next, Qwen3.5 and
GLM-4.5 have such heads, too. The head (`mmspec.models.heads.native_mtp.NativeMtpHead`) is found in
the folder that the target was loaded from, so it needs no `drafter=`, and this recipe is the
default one there. Its own states continue the chain. Exact, with any head. Reconstructed: coupled
noise instead of rejection; of several MTP layers, the first drafts every token.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.feature_head import with_head
from mmspec.drafters.neural.native_mtp import NATIVE_MTP
from mmspec.drafters.shapes import Chain
from mmspec.verifiers.coupled import Coupled

RECIPE = with_head(
    Chain(Fixed(3)),
    Coupled(),
    NATIVE_MTP,
    optimisation="multi-token prediction, with the target",
    paper="DeepSeek-AI 2024",
    reconstructed="coupled noise instead of rejection; one layer for every step",
)
