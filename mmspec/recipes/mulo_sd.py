"""MuLo-SD: a smaller picture drafts rows of codes, and only refused neighbourhoods are redrawn.

Peruzzo et al. 2026 (CVPR 2026, arXiv 2601.05149), "Multi-scale local speculative decoding". The
drafter draws one row of a picture `ratio` times smaller, which is enlarged to that many rows of the
target's. One forward judges all their codes: one is kept where the target gives at least `tau` to
it and its `neighbours` nearest codes together. The others, and what lies within `reach` rows and
columns of them, are drawn anew by the target, island by island. Lossy: tau=0 keeps every draft,
with tau above 1 the target draws everything. `over_accepted_mass` takes drafts without a law for
point masses: it is an upper bound then. verifier="rejection" or "coupled" is exact, and discards
nothing of a block but the refused codes.

`drafter` is any model that draws a smaller grid; how much smaller follows from both models' sizes,
or is `ratio`. It reads the target's prompt, which with Emu3 names the target's size. `upsampler` is
a trained `mmspec.models.code_resampler.CodeResampler` or its folder, "pixels" (decode, resize,
encode; for models with an encoder), "latent" (repeat the code; for models of one tokeniser), a
`mmspec.codes.resampling.Resampler`, or "auto": what lies in the folder "resampler" of the draft
model, else pixels where that can be. A trained one drafts from laws. Reconstructed: tau, neighbours
and reach; islands are drawn without what is missing before them; the small picture is drawn code by
code; the resampler learns codes and laws, not pixels.
"""

from pathlib import Path
from typing import Any

from mmspec.codes.image_family import ImageFamily
from mmspec.codes.resampling import Lawful, Repeated, Resampler, ThroughPixels, Trained
from mmspec.draft import Drafter, Verifier
from mmspec.drafters.plain import Silent
from mmspec.drafters.rows.low_resolution import Sketcher
from mmspec.drafters.rows.upsampled import Upsampled
from mmspec.drafters.rows.wavefront import Rows
from mmspec.modalities.image import families as image
from mmspec.models.code_resampler import FOLDER, CodeResampler, load_resampler
from mmspec.recipe import Kit, Recipe, Tailored
from mmspec.recipes.lantern import table_of
from mmspec.verifiers.local_islands import LocalIslands
from mmspec.verifiers.neighbourhood_threshold import NeighbourhoodThreshold

UPSAMPLERS = ("auto", "pixels", "latent")


def local_islands(kit: Kit) -> Verifier:
    """The judge over the codebook of this model."""
    table = table_of(kit)
    k = min(kit.options["neighbours"], table.k)
    return LocalIslands(NeighbourhoodThreshold(table, k, kit.options["tau"]), kit.options["reach"])


def smaller_picture(kit: Kit) -> Drafter:
    """A model that draws a smaller grid; plain decoding for a target that draws nothing."""
    if not isinstance(kit.shape, Rows):
        raise ValueError("a block is as long as the grid makes it; drop length= and tree=")
    if not image.draws(kit.target.model):
        return Silent()
    if kit.sees != "prompt":
        raise ValueError(
            f"MuLo-SD drafts with a model that draws behind the target's prompt, not one that sees "
            f"{kit.sees!r}; give drafter= a model that draws, and drop sees="
        )
    assert kit.drafter is not None
    fine, coarse = image.image_family(kit.target.model), image.image_family(kit.drafter.model)
    ratio = ratio_of(fine, coarse, kit.options["ratio"])
    sampler = sampler_of(kit, fine, coarse, ratio)
    return Upsampled(Sketcher(kit.drafter), sampler, coarse.layout, ratio)


def ratio_of(fine: ImageFamily, coarse: ImageFamily, given: Any) -> int:
    """How many times smaller the drafter draws: as given, or by the sizes; 2 where there is none.

    Raises ValueError where one size does not divide the other.
    """
    if given is not None:
        if not isinstance(given, int) or given < 1:
            raise ValueError(f"ratio={given!r} is no number of codes; give 2, say")
        return given
    if fine.size is None or coarse.size is None:
        return 2
    ratios = {large / small for large, small in zip(fine.size, coarse.size, strict=True)}
    ratio = int(max(ratios))
    if ratios != {ratio}:
        sizes = [f"{height} x {width}" for height, width in (fine.size, coarse.size)]
        raise ValueError(
            f"the target draws {sizes[0]} codes, the drafter {sizes[1]}: that is no whole number "
            "of times smaller; choose another draft model, or give ratio= and a grid"
        )
    return ratio


def sampler_of(kit: Kit, fine: ImageFamily, coarse: ImageFamily, ratio: int) -> Resampler | Lawful:
    """The up-sampler by name, from a folder, or as an object."""
    given = kit.options["upsampler"]
    if given == "auto" and (beside := beside_of(kit)) is not None:
        given = beside
    if isinstance(given, Path) or (isinstance(given, str) and Path(given).is_dir()):
        given = load_resampler(given)
    if isinstance(given, CodeResampler):
        return Trained(fine.codebook, coarse.codebook, ratio, given)
    if not isinstance(given, str):
        made: Resampler | Lawful = given
        return made
    if given not in UPSAMPLERS:
        raise ValueError(
            f"upsampler={given!r} is neither known nor a folder; choose one of "
            f"{', '.join(UPSAMPLERS)}, or pass a Resampler, a CodeResampler or its folder"
        )
    if given == "auto":
        blind = fine.encode is None or coarse.encode is None
        given = "latent" if blind or ratio == 1 else "pixels"
    if given == "pixels":
        return ThroughPixels(fine, coarse, ratio)
    return Repeated(fine.codebook, coarse.codebook, ratio)


def beside_of(kit: Kit) -> Path | None:
    """The folder of the resampler that lies beside the draft model's weights, if there is one."""
    assert kit.drafter is not None
    name = kit.drafter.model.name_or_path
    folder = Path(name) / FOLDER
    return folder if name and (folder / "config.json").exists() else None


RECIPE = Recipe(
    architecture=smaller_picture,
    execution=Rows("blocks of rows, from a smaller picture"),
    verifier=Tailored(local_islands, "cell by cell, NeighbourhoodThreshold; islands redrawn"),
    sees="auto",
    partner="sketch",
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
