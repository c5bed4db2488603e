"""IbED: one draft model reads several views of the image, and their distributions are mixed.

Lee et al. 2024, "In-batch ensemble drafting: toward fast and robust speculative decoding for
multimodal language models". Views: "pixels" (M), "nothing" (T), "pooled" (P, 2 x 2 image tokens
averaged); "caption" (C) reads a text in place of the image, which another model made and the call
brings: `generate(..., drafter_inputs={"captions": [text, ...]})`, one per prompt. The recorded
distribution is the mixture, so it is exact at every temperature. All views draft as one batch.
"""

from mmspec.drafters.neural.ensemble import uniform_ensemble, with_views
from mmspec.verifiers.coupled import Coupled

RECIPE = with_views(uniform_ensemble, Coupled(), paper="Lee et al. 2024", weights=None)
