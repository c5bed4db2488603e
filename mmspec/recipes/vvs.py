"""VVS: some rounds of relaxed decoding accept part of the draft without a target call.

Dong et al. 2026 (CVPR 2026), "VVS". LANTERN's tree and acceptance; in a skipped round the beginning
of a random path of the tree is accepted, and the next forward reads it together with the next tree.
`skip` is "uniform" (one round in `interval`), "similarity" (rounds with similar paths, mean cosine
of their codes >= `threshold`), "never", or a policy of `mmspec.verifiers.skipping`; nothing is
skipped twice in a row, nor within the first `warm_up` tokens. Lossy, by LANTERN's relaxation and
more by skipping: `over_accepted_mass` measures the verified tokens only, `unverified_tokens` counts
the others. skip="never" is LANTERN bit for bit.

`drafter` is a feature head, as in the paper, or a draft model; after skipped tokens a head
continues from the last known states. Reconstructed: rounds are counted from the first one, one
decision applies to all rows of a batch, and a head does not recompute inputs of reused states.
"""

from mmspec.codes.codebook import Codebook, resolve_codebook
from mmspec.draft import Gate
from mmspec.drafters.neural.feature_head import with_draft_model
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.recipe import Deferred, Kit
from mmspec.recipes.lantern import pooling
from mmspec.verifiers.skipping import Policy, SkipNever, Skipping, SkipSimilar, SkipUniformly

POLICIES = ("uniform", "similarity", "never")


def skipping(kit: Kit) -> Gate:
    """The gate that the options ask for."""
    return Skipping(policy(kit), kit.options["warm_up"])


def policy(kit: Kit) -> Policy:
    """When to skip, by name or as an object."""
    given = kit.options["skip"]
    if not isinstance(given, str):
        chosen: Policy = given
        return chosen
    if given == "uniform":
        return SkipUniformly(kit.options["interval"])
    if given == "similarity":
        return SkipSimilar(codebook(kit), kit.options["threshold"])
    if given == "never":
        return SkipNever()
    raise ValueError(f"skip={given!r} is not known; choose one of {', '.join(POLICIES)}")


def codebook(kit: Kit) -> Codebook:
    """The vectors of the codes. Raises TypeError for a table of neighbours, which has none."""
    given = kit.options["codebook"]
    if given is None:
        given = kit.target.require_image_family().codebook
    use = "skip='similarity' compares the vectors of codes"
    return resolve_codebook(given, use, kit.target.vocabulary, kit.target.device)


RECIPE = with_draft_model(
    execution=DynamicTree(depth=5, beam=10, nodes=58),
    verifier=Deferred(pooling, "Recursive, latent neighbourhood within delta"),
    gate=Deferred(skipping, "some rounds skipped"),
    options={
        "codebook": None,
        "neighbours": 1000,
        "delta": 0.2,
        "skip": "uniform",
        "interval": 5,
        "threshold": 0.7,
        "warm_up": 5,
    },
    least={"interval": 2},
    needs=("codebook",),
    paper="Dong et al. 2026",
    reconstructed="how rounds are counted; one decision per batch",
)
