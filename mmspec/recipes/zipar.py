"""ZipAR: rows of a picture are written side by side, each a few codes behind the one above.

He et al. 2025 (ICML 2025), "ZipAR: parallel autoregressive image generation through spatial
locality". A baseline that speculates nothing: a row begins when the row above has `window` codes,
every forward writes one code in each row that has begun, and nothing is verified. The prefill and
W - 1 + (H - 1) window target calls draw H rows of W codes. Lossy: a code is drawn without what is
still missing above it. `over_accepted_mass` says how far that took it from the target, a total
variation per token. A window of a whole row, or no grid, is plain decoding.

With verifier="rejection" or "coupled" the same rows are only drafts, and the output is exact.

Reconstructed; the released code has another schedule. It writes the first row whole before a second
one begins (ours begins behind `window` codes: W - window calls fewer). The code before a new row,
which nobody knows yet, it stands in for by the newest code two rows above the new one; here it is
the newest of the row above. It keeps what it read first; here codes are read again until the rows
above are complete. The adaptive window of later versions is not there.
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
    paper="He et al. 2025 (ZipAR)",
    reconstructed="the schedule: when a row begins, what stands in, what is read again",
)
