"""SMUD: a CTC transcript is kept where head and decoder agree, the rest is decoded again.

Okabe & Yamamoto 2025 (Interspeech), "Simultaneous masked and unmasked decoding". The greedy path of
the encoder's CTC head is read by the decoder in one pass. Tokens of low confidence in either are
masked; in a mask the decoder generates token by token, each forward also reads the span after the
mask, and the mask ends where its first token scores best. Scores are joint: `weight` log psi + (1 -
`weight`) log p, psi the CTC prefix probability, over the decoder's `most` likeliest tokens and the
end. The output is joint greedy decoding: lossy relative to `generate()`, exact where weight=0; no
sampling.

`sure` is the confidence below which a token is masked from the start. A head with one label more
than the model has tokens predicts these; a head of characters predicts the letters of a token.
Reconstructed from a description of the paper, constants included; spans are always verified, and a
mask has no budget.
"""

from mmspec.draft import Drafter
from mmspec.drafters.neural.ctc_draft import WholeText, check_shape, end_of, labels_of, spelling
from mmspec.drafters.neural.masked_ctc import MaskedCtcDraft
from mmspec.recipe import CTC_HEAD, Kit, Recipe
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
    needs=(CTC_HEAD,),
    paper="Okabe & Yamamoto 2025",
    reconstructed="all but the idea; constants of Mask-CTC and of joint decoding",
)
