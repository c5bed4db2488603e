"""MuLo-SD: a smaller picture drafts rows of codes, and only refused neighbourhoods are redrawn.

Peruzzo et al. 2026 (CVPR 2026, arXiv 2601.05149), "Multi-scale local speculative decoding". The
drafter draws one row of a picture `ratio` times smaller, which is enlarged to that many rows of the
target's. One forward judges all their codes: one is kept where the target gives at least `tau` to
it and its `neighbours` nearest codes together. The others, and what lies within `reach` rows and
columns of them, are drawn anew by the target, island by island. Lossy: tau=0 keeps every draft,
with tau above 1 the target draws everything. `over_accepted_mass` takes drafts without a
distribution for point masses: it is an upper bound then. verifier="rejection" or "coupled" is
exact, and discards nothing of a block but the refused codes.

`drafter` is any model that draws a smaller grid; how much smaller follows from both models' sizes,
or is `ratio`. It reads the target's prompt, which with Emu3 names the target's size. `upsampler` is
a trained `mmspec.models.code_resampler.CodeResampler` or its folder, "pixels" (decode, resize,
encode; for models with an encoder), "latent" (repeat the code; for models of one tokeniser), a
`mmspec.codes.resampling.Resampler`, or "auto": what lies in the folder "resampler" of the draft
model, else pixels where that can be. A trained one drafts from distributions. Reconstructed: tau,
neighbours and reach; islands are drawn without what is missing before them; the small picture is
drawn code by code; the resampler learns codes and distributions, not pixels.
"""

from mmspec.draft import Verifier
from mmspec.drafters.rows.upsampled import LOW_RESOLUTION, smaller_picture
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
    architecture=smaller_picture,
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
    paper="Peruzzo et al. 2026 (MuLo-SD)",
    reconstructed="tau, neighbours, reach; how islands see each other; samplers trained on codes",
)
