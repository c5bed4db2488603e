"""GSD: Jacobi drafts of picture tokens are accepted by groups of tokens instead of one by one.

So et al. 2025, "Grouped speculative decoding for autoregressive image generation". On top of SJD
(Teng et al. 2025): draft token x is accepted with min(1, P/Q), P and Q the mass of its group under
target and draft. A group is a window of `size` tokens around x in the order of p, less those whose
probability differs by `gap` or more and, with a `codebook` (`mmspec.codes.codebook.Codebook`),
those `distance` or more away. Lossy; size=0 is exact, as SJD is. The paper tries sizes 3, 10, 25
and 50; the defaults are those of its code. Reconstructed: the code measures distances between rows
of the input embedding (make a Codebook of them for that); without a codebook only rank and gap
count.
"""

from mmspec.codes.codebook import Codebook
from mmspec.draft import Drafter, Verifier
from mmspec.drafters.growth import Chain
from mmspec.drafters.jacobi.carry_over import Jacobi, window_length
from mmspec.drafters.length import Fixed
from mmspec.recipe import Deferred, Kit, Recipe
from mmspec.verifiers.grouped import Grouped, RankWindow
from mmspec.verifiers.recursive import Recursive


def jacobi_iteration(kit: Kit) -> Drafter:
    """The target's own laws of the pass before."""
    return Jacobi(length=window_length(kit))


def grouping(kit: Kit) -> Verifier:
    """The rule with the settings of this kit."""
    codebook = kit.options["codebook"]
    if codebook is not None:
        if not isinstance(codebook, Codebook):
            raise TypeError(
                f"codebook is a {type(codebook).__name__}, but groups need the vectors themselves; "
                "give codebook= a mmspec.codes.codebook.Codebook"
            )
        codebook.check(kit.target.vocabulary)
        codebook = codebook.to(kit.target.device)
    size, gap, distance = (kit.options[name] for name in ("size", "gap", "distance"))
    return Recursive(Grouped(RankWindow(size, gap, codebook, distance)))


RECIPE = Recipe(
    architecture=jacobi_iteration,
    execution=Chain(Fixed(15)),
    verifier=Deferred(grouping, "Recursive, groups of tokens next to each other in rank"),
    sees="target-memory",
    options={"codebook": None, "size": 14, "gap": 0.15, "distance": 0.5},
    paper="So et al. 2025; Teng et al. 2025",
    reconstructed="a codebook in place of the input embedding, and none by default",
)
