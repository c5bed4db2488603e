"""MuLo-SD: a smaller image drafts rows of codes, and only rejected neighbourhoods are resampled.

Peruzzo et al. 2026 (CVPR 2026, arXiv 2601.05149), "Multi-scale local speculative decoding". The
drafter generates one row of an image `ratio` times smaller, which is enlarged to that many rows of
the target's. One forward verifies all their codes: one is accepted where the target gives at least
`tau` to it and its `neighbours` nearest codes together. The others, and codes within `reach` rows
and columns of them, are sampled again by the target, island by island. Lossy: tau=0 keeps every
draft, with tau above 1 the target samples everything. `over_accepted_mass` treats drafts without a
distribution as point masses, which is an upper bound. verifier="rejection" or "coupled" is exact,
and drops only the rejected codes of a block.

`drafter` is any model of a smaller grid; `ratio` defaults to that of both models' sizes. It reads
the target's prompt, which names the target's size for Emu3. `upsampler` is a trained
`mmspec.models.code_resampler.CodeResampler` or its folder, "pixels" (decode, resize, encode; for
models with an encoder), "latent" (repeat the code; for models of one tokeniser), a
`mmspec.codes.resampling.Resampler`, or "auto": the folder "resampler" of the draft model, else
pixels if possible. A trained one drafts from distributions. Reconstructed: tau, neighbours and
reach; islands are sampled without the codes missing before them; the small image is generated code
by code; the resampler is trained on codes and distributions, not pixels.
"""

from mmspec.draft import Verifier
from mmspec.drafters.rows.upsampled import LOW_RESOLUTION, low_resolution_image
from mmspec.drafters.rows.wavefront import RowShape
from mmspec.recipe import Deferred, Kit, Recipe
from mmspec.recipes.lantern import neighbours_of
from mmspec.verifiers.local_islands import LocalIslands
from mmspec.verifiers.neighbourhood_threshold import NeighbourhoodThreshold


def local_islands(kit: Kit) -> Verifier:
    """The judge over the codebook of this model."""
    near = NeighbourhoodThreshold(*neighbours_of(kit), kit.options["tau"])
    return LocalIslands(near, kit.options["reach"])


RECIPE = Recipe(
    architecture=low_resolution_image,
    execution=RowShape("blocks of rows, from a smaller picture"),
    verifier=Deferred(
        local_islands,
        "cell by cell, NeighbourhoodThreshold; islands redrawn",
        kinds=LocalIslands.kinds,
    ),
    sees="auto",
    draft_model=(LOW_RESOLUTION,),
    options={
        "codebook": None,
        "neighbours": 100,
        "tau": 0.1,
        "reach": 1,
        "ratio": None,
        "upsampler": "auto",
    },
    needs=("image tokens",),
    paper="Peruzzo et al. 2026 (MuLo-SD)",
    reconstructed="tau, neighbours, reach; how islands see each other; samplers trained on codes",
)
