"""StD: the target drafts for itself, reading only the visual tokens that its question attends to.

Zhang et al. 2025, "Sparse-to-Dense: a free lunch for lossless acceleration of video understanding
in LLMs". All layers draft, on text and on the K visual keys and values per layer and head that
prefill attention selects; one dense pass verifies, and the next draft reads its cache. It saves
bandwidth only, so it needs long visual contexts: with N tokens in the cache and a draft of gamma,
acceptance must exceed (K + text) / N + 1 / gamma. K is 512, and at most a quarter of the visual
tokens: 144 of 576. `kv="sparse:tokens=256"` sets K; with K at least the number of visual tokens the
draft is the target's own text; `every=8` selects again after 8 drafts, where the paper selects
once. Exact; verified with coupled noise here. Reconstructed: K is the same for any text, where the
paper has K + text = 1024, and the quarter, for clips shorter than the paper's.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.shared import all_layers, with_own_layers
from mmspec.drafters.shapes import Chain
from mmspec.verifiers.coupled import Coupled

RECIPE = with_own_layers(
    all_layers,
    Chain(Fixed(9)),
    Coupled(),
    kv="sparse:tokens=512,share=0.25",
    optimisation="attention top-k of keys and values per layer and head",
    paper="Zhang et al. 2025",
    reconstructed="512 visual tokens whatever the text is, at most a quarter of them",
)
