"""ZipAR: rows of an image are generated in parallel, each a few codes after the one above.

He et al. 2025 (ICML 2025), "ZipAR: parallel autoregressive image generation through spatial
locality". A baseline without verification: a row begins when the row above has `window` codes, and
each forward generates one code in every begun row. The prefill and W - 1 + (H - 1) window target
calls generate H rows of W codes. Lossy: a code is sampled without the codes still missing above it.
`over_accepted_mass` measures the total variation to the target per token. A window of a whole row,
or no grid, is plain decoding.

With verifier="rejection" or "coupled" the same rows are only drafts, and the output is exact.

Reconstructed; the released code has another schedule. It completes the first row before a second
one begins (here after `window` codes: W - window calls fewer). It replaces the unknown code before
a new row by the newest code two rows above; here by the newest of the row above. It reads each code
once; here codes are read again until the rows above are complete. The adaptive window of later
versions is left out.
"""

from mmspec.draft import Drafter
from mmspec.drafters.rows.wavefront import RowShape, Wavefront
from mmspec.recipe import Kit, Recipe
from mmspec.verifiers.unchecked import Unchecked


def wavefront(kit: Kit) -> Drafter:
    """Rows that begin behind each other."""
    if not isinstance(kit.shape, RowShape):
        raise ValueError("a wavefront is as long as the grid makes it; drop length= and tree=")
    return Wavefront(kit.options["window"])


RECIPE = Recipe(
    architecture=wavefront,
    execution=RowShape(),
    verifier=Unchecked(),
    sees="target-memory",
    options={"window": 8},
    least={"window": 1},
    needs=("image tokens",),
    paper="He et al. 2025 (ZipAR)",
    reconstructed="the schedule: when a row begins, what stands in, what is read again",
)
