"""GSD: Jacobi drafts of image tokens are accepted by groups of similar tokens.

So et al. 2025, "Grouped speculative decoding for autoregressive image generation". On top of SJD
(Teng et al. 2025): draft token x is accepted with min(1, P/Q), P and Q the mass of its group under
target and draft. A group is a window of `size` tokens around x in the order of p, less those whose
probability differs by `gap` or more, and those `distance` or more away: a squared distance between
rows of the input embedding, as in the code, or between the vectors of a `codebook`
(`mmspec.codes.codebook.Codebook`) where one is given. Lossy; size=0 is exact, as SJD is. The paper
tries sizes 3, 10, 25 and 50; the defaults are those of its code, whose distance suits the embedding
of Lumina-mGPT. `suffix` selects what follows a rejected token: "resample" samples it again, as in
the paper, "couple" keeps what MC-SJD keeps (So et al. 2026). Reconstructed: windows that reach
tokens which are no image tokens; for other models only rank and gap count.
"""

from collections.abc import Callable, Mapping

from mmspec.codes.codebook import resolve_codebook
from mmspec.draft import Drafter, Verifier
from mmspec.drafters.jacobi.window import (
    maximally_coupled_window,
    resampled_window,
    with_window,
)
from mmspec.recipe import Deferred, Kit
from mmspec.verifiers.grouped import Embeddings, Grouped, RankWindow, TokenDistance
from mmspec.verifiers.recursive import Recursive

WINDOWS: Mapping[str, Callable[[Kit], Drafter]] = {
    "resample": resampled_window,
    "couple": maximally_coupled_window,
}


def jacobi_iteration(kit: Kit) -> Drafter:
    """The target's own distributions of the pass before."""
    suffix = kit.options["suffix"]
    if suffix not in WINDOWS:
        raise ValueError(f"suffix={suffix!r} is not known; choose one of {', '.join(WINDOWS)}")
    return WINDOWS[suffix](kit)


def grouping(kit: Kit) -> Verifier:
    """The rule with the settings of this kit."""
    size, gap, distance = (kit.options[name] for name in ("size", "gap", "distance"))
    return Recursive(Grouped(RankWindow(size, gap, token_distance(kit), distance)))


def token_distance(kit: Kit) -> TokenDistance | None:
    """The vectors that are given, else what a model that draws reads for its codes."""
    codebook, drawn = kit.options["codebook"], kit.target.image_family
    if codebook is None:
        return None if drawn is None else Embeddings(kit.target.embed, drawn.codebook.codes)
    use = "groups need the vectors themselves"
    return resolve_codebook(codebook, use, kit.target.vocabulary, kit.target.device)


RECIPE = with_window(
    architecture=jacobi_iteration,
    length=15,
    verifier=Deferred(grouping, "Recursive, groups of tokens next to each other in rank"),
    options={"suffix": "resample", "codebook": None, "size": 14, "gap": 0.15, "distance": 0.5},
    needs=("image tokens",),
    paper="So et al. 2025; Teng et al. 2025",
    reconstructed="windows that reach tokens which are no codes",
)
