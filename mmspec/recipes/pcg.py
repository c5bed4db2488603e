"""PCG: groups of acoustically similar codes are verified exactly, their tokens are not.

"Principled coarse-graining" (2025), arXiv 2511.13732: a token's mass is split evenly over the
groups that hold it, and speculative sampling decides about the group. Exact in the distribution of
the group, lossy in tokens: an accepted token follows the draft. A group is the neighbourhood of a
token: ids whose input embeddings have a cosine of at least `threshold` (with `codebook`, its
vectors). Control ids of the model's configuration and those in `control` are groups of their own. A
threshold above 1 is speculative sampling, exact. Reconstructed: the threshold, and one group around
each token.
"""

import torch

from mmspec.codes.codebook import Codebook, resolve_codebook
from mmspec.draft import Verifier
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.feature_head import with_draft_model
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Deferred, Kit
from mmspec.targets.tokens.context import control_ids
from mmspec.verifiers.coarse_groups import CoarseGroups, Groups
from mmspec.verifiers.recursive import Recursive


def grouping(kit: Kit) -> Verifier:
    """The rule over groups of this model's tokens."""
    if kit.target.device.type == "meta":  # nothing is known of a model without weights
        return Recursive(CoarseGroups(Groups.singletons(kit.target.vocabulary)))
    return Recursive(CoarseGroups(Groups.around_codes(codes(kit), kit.options["threshold"])))


def codes(kit: Kit) -> Codebook:
    """The codebook that is given, else what the model reads for all ids but control ids."""
    target, given = kit.target, kit.options["codebook"]
    if given is not None:
        return resolve_codebook(given, "groups need the vectors", target.vocabulary, target.device)
    frame = control_ids(target) | set(kit.options["control"])
    kept = [token for token in range(target.vocabulary) if token not in frame]
    ids = torch.tensor(kept, device=target.device)
    return Codebook(target.embed(ids[None])[0].float(), ids, target.vocabulary)


RECIPE = with_draft_model(
    execution=Chain(Fixed(3)),
    verifier=Deferred(grouping, "Recursive, groups of codes that sound alike"),
    options={"codebook": None, "threshold": 0.8, "control": ()},
    paper="arXiv 2511.13732",
    reconstructed="the threshold, and one group around each token",
)
