"""CTC-SSD: the CTC head of a speech model's encoder drafts the whole transcript at once.

Saon et al. 2026, "Self-speculative decoding with CTC encoder drafts". The greedy path of the head,
retokenized, is kept unchanged if no frame's entropy exceeds `tau_ctc` nats (the language model then
never runs); else one pass of the language model accepts tokens while p >= `tau_slm`, the end of the
text included, and plain decoding continues from there. The encoder runs once for both. Lossy, as
measured by `unverified_tokens` and the word error rate; greedy decoding with tau_ctc=-1 and tau_slm
above 0.5 is exact. The defaults are the published run of the 1B model.

`fallback="restart"` is the released script: a draft with a rejected token is dropped, and its end
is not verified; `check_end` overrides that. `tokenizer` defaults to the one in the model's folder.
Reconstructed: the check of the end, which the script lacks; beams.
"""

from mmspec.draft import Gate, Verifier
from mmspec.drafters.neural.ctc_draft import WholeText, ctc_head, end_of
from mmspec.recipe import CTC_HEAD, Deferred, Kit, Recipe
from mmspec.verifiers.all_or_nothing import AllOrNothing
from mmspec.verifiers.entropy_gate import EntropyGate
from mmspec.verifiers.likelihood_floor import LikelihoodFloor
from mmspec.verifiers.recursive import Recursive

FALLBACKS = {"resume": Recursive, "restart": AllOrNothing}


def floor(kit: Kit) -> Verifier:
    """The rule, and what becomes of the tokens before a refused one."""
    how, checks = kit.options["fallback"], kit.options["check_end"]
    if how not in FALLBACKS:
        raise ValueError(f"fallback={how!r} is not known; choose {' or '.join(FALLBACKS)}")
    checks = how == "resume" if checks is None else checks
    spared = () if checks else (end_of(kit),)
    return FALLBACKS[how](LikelihoodFloor(kit.options["tau_slm"], spared))


def sure(kit: Kit) -> Gate:
    """What keeps a draft that the encoder is sure of."""
    return EntropyGate(kit.options["tau_ctc"])


RECIPE = Recipe(
    architecture=ctc_head,
    execution=WholeText(),
    verifier=Deferred(floor, "Recursive, likelihood floor tau_slm"),
    gate=Deferred(sure, "a transcript the encoder is sure of is kept"),
    options={
        "tau_slm": 0.2,
        "tau_ctc": 0.7,
        "fallback": "resume",
        "check_end": None,
        "tokenizer": None,
    },
    sees="encoder",
    needs=(CTC_HEAD,),
    paper="Saon et al. 2026",
    reconstructed="the check of the end",
)
