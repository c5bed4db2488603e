"""VVS: some rounds of relaxed decoding keep part of the draft without asking the target.

Dong et al. 2026 (CVPR 2026), "VVS". LANTERN's tree and acceptance; in a skipped round the head of a
random path of the tree is kept as it is, and the next forward reads it together with the next tree.
`skip` is "uniform" (one round in `interval`), "similarity" (rounds whose paths look alike, mean
cosine of their codes >= `threshold`), "never", or a policy of `mmspec.verifiers.skipping`; nothing
is skipped twice in a row, nor within the first `warm_up` tokens. Lossy, by LANTERN's relaxation
and more by skipping: `over_accepted_mass` measures the verified tokens only, `unverified_tokens`
counts the others. skip="never" is LANTERN bit for bit.

`drafter` is a feature head, as in the paper, or a draft model; a head goes on from the last states
that it knows where tokens were skipped. Reconstructed: rounds are counted from the first one, one
decision is made for all rows of a batch, and what a head read of borrowed states is not read again.
"""

from mmspec.codes.codebook import Codebook, vectors_for
from mmspec.draft import Gate
from mmspec.drafters.neural.feature_head import with_draft_model
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.recipe import Deferred, Kit
from mmspec.recipes.lantern import pooling
from mmspec.verifiers.skipping import Never, Policy, Similar, Skipping, Uniform

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
        return Uniform(kit.options["interval"])
    if given == "similarity":
        return Similar(codebook(kit), kit.options["threshold"])
    if given == "never":
        return Never()
    raise ValueError(f"skip={given!r} is not known; choose one of {', '.join(POLICIES)}")


def codebook(kit: Kit) -> Codebook:
    """The vectors of the codes. Raises TypeError for a table of neighbours, which has none."""
    given = kit.options["codebook"]
    if given is None:
        given = kit.target.check_draws().codebook
    use = "skip='similarity' compares the vectors of codes"
    return vectors_for(given, use, kit.target.vocabulary, kit.target.device)


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
    paper="Dong et al. 2026",
    reconstructed="how rounds are counted; one decision per batch",
)
