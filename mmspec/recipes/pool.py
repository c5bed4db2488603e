"""Pool: one of several drafters drafts in each round, chosen online by what the target accepted.

BanditSpec (Hou et al. 2025), MetaSD and Not-a-Bandit (2025). `arms` are coupled recipes; those with
a draft model share `drafter`. `selector` is "hedge" (all arms propose, so the losses of all are
known: Not-a-Bandit), "ucb" (BanditSpec and MetaSD) or "exp3" (BanditSpec, for rewards that change);
the last two run the chosen arm only. `fresh=False` keeps what was learned for later requests.
Exact. Reconstructed: the reward, accepted tokens over `longest`, and the rates.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from mmspec import recipes
from mmspec.draft import Drafter
from mmspec.drafters.neural.feature_head import HEADS
from mmspec.drafters.neural.small_model import SMALL_MODEL
from mmspec.drafters.pool import DrafterPool
from mmspec.drafters.selectors import SELECTORS
from mmspec.recipe import TREE, Kit, Recipe, pair
from mmspec.verifiers.coupled import Coupled


@dataclass(frozen=True)
class ChosenShape:
    """The shape of a draft is that of the arm that drafts it."""

    description: ClassVar[str] = "as the chosen arm drafts"
    walk: ClassVar[str] = TREE


def pool_of_recipes(kit: Kit) -> Drafter:
    """The drafters of several recipes for one target. Raises ValueError for what makes no pool."""
    names, selector = kit.options["arms"], kit.options["selector"]
    if selector not in SELECTORS:
        known = ", ".join(SELECTORS)
        raise ValueError(f"selector={selector!r} is not known; choose one of {known}")
    if not isinstance(kit.shape, ChosenShape):
        raise ValueError("the arms of a pool have their own shapes; drop length= and tree=")
    drafters = [_arm(kit, name) for name in names]
    return DrafterPool(
        drafters, SELECTORS[selector](), kit.options["longest"], kit.options["fresh"]
    )


def _arm(kit: Kit, name: str) -> Drafter:
    plan = recipes.get(name)
    if not isinstance(plan.verifier, Coupled) or plan.gate is not None or name.startswith("pool"):
        raise ValueError(
            f"recipe {name!r} cannot be an arm, because its output is not that of coupled noise; "
            "choose recipes such as coupled, dynamic-tree, prompt-lookup, suffix"
        )
    if plan.takes_drafter and kit.drafter is None:
        raise ValueError(f"the arm {name!r} needs a draft model; use recipe='pool' with drafter=")
    own = replace(kit, shape=plan.execution, options=plan.options, kv=plan.kv)
    return pair(plan.architecture(own), Coupled(), kit.target)


RECIPE = Recipe(
    architecture=pool_of_recipes,
    execution=ChosenShape(),
    verifier=Coupled(),
    sees="auto",
    draft_model=(SMALL_MODEL, *HEADS),
    options={
        "arms": ("coupled", "prompt-lookup", "suffix"),
        "selector": "hedge",
        "longest": 8,
        "fresh": True,
    },
    paper="Hou et al. 2025; Not-a-Bandit, 2025",
    reconstructed="the reward and the rates",
)
