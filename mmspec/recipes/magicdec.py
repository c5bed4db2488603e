"""MagicDec: the target drafts for itself on the first tokens and a window of its cache.

Chen et al. 2024, "MagicDec: breaking the latency-throughput tradeoff for long context generation
with speculative decoding". All layers draft, on the first `sinks` tokens and on the last ones of
the prompt, and on all generated ones; one dense pass verifies. `kv="window:tokens=256,sinks=4"`
sets both. It saves the bandwidth of keys and values, which dominates with long prompts and large
batches. Exact. Reconstructed: the window is fixed after the prompt and grows with the generated
text (StreamingLLM moves it); `kv="sparse"` is the selection by attention that the paper calls
SnapKV.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.shared import all_layers, with_own_layers
from mmspec.drafters.shapes import Chain
from mmspec.verifiers.coupled import Coupled

RECIPE = with_own_layers(
    all_layers,
    Chain(Fixed(3)),
    Coupled(),
    kv="window:tokens=256,sinks=4",
    optimisation="first tokens and a window of the prompt",
    paper="Chen et al. 2024",
    reconstructed="the window is that of the prompt's end and grows with the text",
)
