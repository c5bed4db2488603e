"""SJD-PV: frequent phrases of image tokens are accepted jointly in a Jacobi window.

Yu et al. 2026 (arXiv 2603.06666). `phrases` is a library built by merging frequent neighbours in
the rows of sampled grids (`mmspec.codes.phrases.Phrases.build`), or its file; a phrase is accepted
with min(1, prod p/q). Lossy, and not measured: a rejected phrase is tested again token by token.
Without a library it is SJD and exact; so is greedy decoding. Reconstructed: the longest match is
used, phrases have at most four tokens and stay within a row, and the tokens of a rejected phrase
are tested singly.
"""

import logging
from pathlib import Path

from mmspec.codes.phrases import Phrases, Trie
from mmspec.draft import Verifier
from mmspec.drafters.jacobi.window import resampled_window, with_window
from mmspec.recipe import Deferred, Kit
from mmspec.verifiers.phrase import PhraseJoint

log = logging.getLogger("mmspec")


def phrasing(kit: Kit) -> Verifier:
    """The walk over the library of this kit."""
    given = kit.options["phrases"]
    if given is None:
        given = Phrases()
        if kit.target.device.type != "meta":
            log.warning("without phrases= 'sjd-pv' is the recipe 'sjd'; `mmspec train phrases` "
                        "builds a library")  # fmt: skip
    elif isinstance(given, str | Path):
        given = Phrases.load(given)
    if not isinstance(given, Phrases):
        raise TypeError(
            f"phrases is a {type(given).__name__}; give a mmspec.codes.phrases.Phrases or its file"
        )
    return PhraseJoint(Trie.build(given, kit.target.vocabulary, kit.target.device))


RECIPE = with_window(
    resampled_window,
    15,
    Deferred(phrasing, "Phrases jointly, else exact, token by token", kinds=PhraseJoint.kinds),
    options={"phrases": None},
    needs=("image tokens",),
    paper="Yu et al. 2026",
    reconstructed="the choice of phrases, and what follows a refused one",
)
