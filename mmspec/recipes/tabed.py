"""TABED: an ensemble of views whose weights are adapted while decoding, by past accuracy.

"TABED: test-time adaptive ensemble drafting for robust speculative decoding in LVLMs", 2026. After
each verification the weights move to the point of a grid (step 0.1) whose mixture would have
predicted the target's choice most often; ties go to the smallest divergence. Exact. All views draft
as one batch; they are those of `ibed`, the one of captions included.
"""

from mmspec.drafters.neural.ensemble import tested_ensemble, with_views
from mmspec.verifiers.coupled import Coupled

RECIPE = with_views(tested_ensemble, Coupled(), paper="TABED, 2026", steps=10, window=0)
