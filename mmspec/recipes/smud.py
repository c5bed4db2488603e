"""SMUD: a CTC transcript is kept where head and decoder agree; what they doubt is decoded anew.

Okabe & Yamamoto 2025 (Interspeech), "Simultaneous masked and unmasked decoding". The greedy path of
the encoder's CTC head is read by the decoder in one pass. Tokens that either doubts are masked; in
a mask the decoder writes token by token, every forward also holds the span behind the mask, and the
mask ends where its first token scores best. Scores are joint: `weight` log psi + (1 - `weight`)
log p, psi the CTC prefix probability, over the decoder's `most` likeliest tokens and the end. What
comes out is joint greedy decoding: lossy against `generate()`, exact where weight=0; no sampling.

`sure` is the confidence below which a token is masked from the start. A head of one label more than
the model has tokens speaks for these; one of characters speaks for the letters of a token.
Reconstructed from a description of the paper: all of it, constants included; spans are always
verified, and a mask has no budget.
"""

from mmspec.draft import Drafter
from mmspec.drafters.neural.ctc_draft import WholeText, check_shape, end_of, labels_of, spelling
from mmspec.drafters.neural.masked_ctc import MaskedCtcDraft
from mmspec.recipe import Kit, Recipe
from mmspec.verifiers.joint_greedy import JointGreedy


def masked_transcript(kit: Kit) -> Drafter:
    """What the target's own CTC head heard, doubtful spans masked."""
    check_shape(kit)
    sure, weight, most = (kit.options[name] for name in ("sure", "weight", "most"))
    if not 0 <= weight <= 1 or most < 1:
        raise ValueError(
            f"weight={weight}, most={most}; a weight lies in [0, 1], most is 1 or more"
        )
    return MaskedCtcDraft(spelling(kit), labels_of(kit), end_of(kit), sure, weight, most)


RECIPE = Recipe(
    architecture=masked_transcript,
    execution=WholeText(),
    verifier=JointGreedy(),
    options={"sure": 0.999, "weight": 0.3, "most": 8, "tokenizer": None},
    sees="encoder",
    hears=True,
    paper="Okabe & Yamamoto 2025",
    reconstructed="all but the idea; constants of Mask-CTC and of joint decoding",
)
