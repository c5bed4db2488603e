"""GSD: Jacobi drafts of image tokens are accepted by groups of similar tokens.

So et al. 2025, "Grouped speculative decoding for autoregressive image generation". On top of SJD
(Teng et al. 2025): draft token x is accepted with min(1, P/Q), P and Q the mass of its group under
target and draft. A group is a window of `size` tokens around x in the order of p, less those whose
probability differs by `gap` or more, and those `distance` or more away: a squared distance between
rows of the input embedding, as in the code, or between the vectors of a `codebook`
(`mmspec.codes.codebook.Codebook`) where one is given. Lossy; size=0 is exact, as SJD is. The paper
tries sizes 3, 10, 25 and 50; the defaults are those of its code, whose distance suits the embedding
of Lumina-mGPT. `suffix` selects what follows a rejected token: "resample" samples it again, as in
the paper, "couple" keeps what MC-SJD keeps (So et al. 2026). Where all groups hold one code, a
warning tells so when the recipe is bound. Reconstructed: windows that reach tokens which are no
image tokens; for other models only rank and gap count.
"""

import logging
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

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

log = logging.getLogger("mmspec")
TRIED = 64  # codes whose nearest neighbour is looked for
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
    window = RankWindow(size, gap, token_distance(kit), distance)
    _warn_of_single_codes(window, kit)
    return Recursive(Grouped(window))


def token_distance(kit: Kit) -> TokenDistance | None:
    """The vectors that are given, else what a model that draws reads for its codes."""
    codebook, drawn = kit.options["codebook"], kit.target.image_family
    if codebook is None:
        return None if drawn is None else Embeddings(kit.target.embed, drawn.codebook.codes)
    use = "groups need the vectors themselves"
    return resolve_codebook(codebook, use, kit.target.vocabulary, kit.target.device)


def _warn_of_single_codes(window: RankWindow, kit: Kit) -> None:
    """Warn of groups that hold one code each, which make this recipe another one."""
    basis = "mc-sjd" if kit.options["suffix"] == "couple" else "sjd"
    same = f"so every group holds one code and this is {basis!r}, exact"
    if window.size < 2:
        log.warning("size=%d, %s; give size=14, or another of 2 and more", window.size, same)
    elif window.codebook is not None and kit.target.device.type != "meta":
        codes = kit.options["codebook"] or kit.target.image_family.codebook
        least = _least_distance(window.codebook, codes.ids.to(kit.target.device))
        if least >= window.distance:
            log.warning(
                "no code has another within distance=%g (the nearest of those tried are %.3g "
                "apart, squared), %s; give a larger distance=, or inf to group by rank alone",
                *(window.distance, least, same),
            )


@torch.no_grad()
def _least_distance(near: TokenDistance, ids: Tensor) -> float:
    """The least squared distance between some codes, evenly spread, and all others."""
    some = ids[:: -(-len(ids) // TRIED)]
    least = [
        near.squared_distance(some[:, None], part)
        .masked_fill(some[:, None] == part, torch.inf)
        .min()
        for part in ids.split(TRIED)
    ]
    return float(torch.stack(least).min())


RECIPE = with_window(
    architecture=jacobi_iteration,
    length=15,
    verifier=Deferred(grouping, "Recursive, groups of tokens next to each other in rank"),
    options={"suffix": "resample", "codebook": None, "size": 14, "gap": 0.15, "distance": 0.5},
    needs=("image tokens",),
    paper="So et al. 2025; Teng et al. 2025",
    reconstructed="windows that reach tokens which are no codes",
)
