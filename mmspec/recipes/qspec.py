"""QSpec: the target drafts for itself with quantised weights and activations.

Zhao et al. 2024, "QSpec: speculative decoding with complementary quantization schemes". Draft and
target share one cache: the target's scoring overwrites the keys and values of the draft. Exact.
`precision` is "int8" (weights and activations), "int4" (weights; activations of 8 bits, by
torchao), "bfloat16" or "float16". The quantised weights are a second copy. Reconstructed: the paper
quantises the target's weights as well (W4A16) and the draft's activations to 4 bits, with kernels
of its own; here the target stays as it was loaded.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.quantized import quantized_self
from mmspec.drafters.neural.shared import with_own_layers
from mmspec.drafters.shapes import Chain
from mmspec.verifiers.coupled import Coupled

RECIPE = with_own_layers(
    quantized_self,
    Chain(Fixed(4)),
    Coupled(),
    options={"precision": "int8"},
    optimisation="weights and activations of 8 bits",
    paper="Zhao et al. 2024",
    reconstructed="8 bits in place of 4; the target is not quantised",
)
