"""LANTERN++: neighbours raise the acceptance of an image token by at most a factor.

Park et al. 2025, "LANTERN++: enhancing relaxed speculative decoding with static tree drafting for
visual auto-regressive models". The mass of the `neighbours` nearest codes counts for a draft token
up to (factor - 1) p(x), so that no token outside the target's support is accepted. Lossy; factor=1
is exact. The paper runs (neighbours, factor) = (10, 5), (5, 10) and (5, 20) on Lumina-mGPT, on the
static tree of 57 nodes used here. `codebook` defaults to the model's own: a
`mmspec.codes.codebook.Codebook`, a table of neighbours or its file. `drafter` is a feature head, as
in the paper (EAGLE-1), or a draft model. Reconstructed: corrections from norm((p - q)+), the
optimum, not those of the released code.
"""

from mmspec.draft import Kind, Verifier
from mmspec.drafters.neural.feature_head import with_draft_model
from mmspec.drafters.shapes import StaticTree
from mmspec.recipe import Deferred, Kit
from mmspec.recipes.lantern import neighbours_of
from mmspec.trees import Tree
from mmspec.verifiers.latent_neighbourhood import LatentNeighbourhood, Multiplicative
from mmspec.verifiers.recursive import Recursive

TREE = Tree.from_digits(
    "0 1 2 3 4 00 01 02 03 10 11 12 20 21 22 30 31 40 000 001 002 003 010 011 012 020 021 022 "
    "030 031 100 101 110 200 0000 0001 0002 0003 0010 0011 0012 0020 0021 0030 0100 0101 0110 "
    "0200 00000 00001 00002 00010 00011 00100 00101 00110 00200"
)


def pooling(kit: Kit) -> Verifier:
    """The rule over the codebook of this model."""
    bound = Multiplicative(kit.options["factor"])
    return Recursive(LatentNeighbourhood(*neighbours_of(kit), bound))


RECIPE = with_draft_model(
    execution=StaticTree(TREE, kinds=(Kind.WOR,)),
    verifier=Deferred(pooling, "Recursive, latent neighbourhood within a factor"),
    options={"codebook": None, "neighbours": 10, "factor": 5.0},
    needs=("codebook",),
    paper="Park et al. 2025",
    reconstructed="the optimal residual",
)
