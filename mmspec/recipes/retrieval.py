"""Retrieval: propose the actions of the nearest stored moments.

The database of HeiSD alone (Zheng et al. 2026): `store` holds trajectories, a folder or a
`mmspec.codes.trajectories.Trajectories`; the `neighbours` whose features are nearest by cosine make
a tree. Exact. Needs no drafter. Reconstructed: how many neighbours, and that features are the
policy's own last state.
"""

from mmspec.drafters.actions.retrieval import retrieval
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=retrieval,
    execution=Chain(Fixed(64)),
    verifier=Coupled(),
    options={"store": None, "neighbours": 4},
    sees="target-states",
    needs=("action space",),
    paper="Zheng et al. 2026",
    reconstructed="the number of neighbours, and the features",
    decodes="actions",
)
