"""Speculative cascades: the target's distribution where a deferral rule asks for it, else q.

Narasimhan et al. 2024 ("Faster cascades via speculative decoding"). `deferral` is "chow" (max q <
1 - alpha), "difference" (max q < max p - alpha), "optimal" (max q < max p - alpha TV) or "token"
(q on tokens with p >= (1 - alpha) max p). The output is exactly the rule's v, and runs report
TV(v, p). Lossy. Reconstructed: the default alpha.
"""

from mmspec.draft import Rule, Verifier
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.feature_head import with_draft_model
from mmspec.drafters.shapes import Chain
from mmspec.errors import check_number
from mmspec.recipe import Deferred, Kit
from mmspec.verifiers.cascade import DEFERRALS, Cascade, TokenCascade
from mmspec.verifiers.recursive import Recursive


def build_cascade(kit: Kit) -> Verifier:
    """The deferral rule of this kit. Raises ValueError for unknown names and prices."""
    name, alpha = kit.options["deferral"], kit.options["alpha"]
    if name not in ("token", *DEFERRALS):
        raise ValueError(
            f"deferral={name!r} is not known; choose one of token, {', '.join(DEFERRALS)}"
        )
    check_number("alpha", alpha, 0, 1, example=0.3)
    rule: Rule = TokenCascade(alpha) if name == "token" else Cascade(DEFERRALS[name](alpha))
    return Recursive(rule)


RECIPE = with_draft_model(
    execution=Chain(Fixed(5)),
    verifier=Deferred(build_cascade, "Recursive, p where a deferral rule asks for it, else q"),
    options={"deferral": "optimal", "alpha": 0.3},
    paper="Narasimhan et al. 2024",
    reconstructed="the default alpha",
)
