"""LANTERN: an image token is accepted with the probability of its nearest codes.

Jang et al. 2025, "LANTERN: accelerating visual autoregressive models with relaxed speculative
decoding". The target's mass on the `neighbours` nearest codes of a draft token, up to `delta`,
counts for the token. Lossy: delta bounds the change of p for one token; the distance of the output,
which can be larger, is reported as `over_accepted_mass`. delta=0 is exact, as EAGLE-2 is. The tree
has the 58 drafted nodes of the code, whose total_token=59 counts the root. `codebook` defaults to
the model's own: a `mmspec.codes.codebook.Codebook`, a table of neighbours or its file. `drafter` is
a feature head, as in the paper (EAGLE-2), or a draft model. Reconstructed: corrections from norm((p
- q)+), the optimum, where the released code removes the neighbours from p
(`mmspec.verifiers.latent_neighbourhood`); greedy decoding stays exact unless delta=1.
"""

from mmspec.codes.codebook import Neighbours, resolve_neighbours
from mmspec.draft import Verifier
from mmspec.drafters.neural.feature_head import with_draft_model
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.recipe import Deferred, Kit
from mmspec.verifiers.latent_neighbourhood import AdditiveBound, LatentNeighbourhood
from mmspec.verifiers.recursive import Recursive


def pooling(kit: Kit) -> Verifier:
    """The rule over the codebook of this model."""
    bound = AdditiveBound(kit.options["delta"])
    return Recursive(LatentNeighbourhood(*neighbours_of(kit), bound))


def neighbours_of(kit: Kit) -> tuple[Neighbours, int]:
    """A table of neighbours, and how many of them the options ask for."""
    source = kit.options["codebook"]
    if source is None and kit.target.image_family is not None:
        source = kit.target.image_family.codebook
    k = kit.options["neighbours"]
    table = resolve_neighbours(source, k, kit.target.vocabulary, kit.target.device)
    return table, min(k, table.k)


RECIPE = with_draft_model(
    execution=DynamicTree(depth=5, beam=10, nodes=58),
    verifier=Deferred(pooling, "Recursive, latent neighbourhood within delta"),
    options={"codebook": None, "neighbours": 1000, "delta": 0.1},
    needs=("codebook",),
    paper="Jang et al. 2025",
    reconstructed="the optimal residual",
)
