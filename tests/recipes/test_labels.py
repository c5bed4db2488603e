"""What is labelled exact, and what lossy: measured on models that are counted, over all there is.

Nothing here lists recipes, rules, gates or policies; what is in the tree is measured. A label is
`exact` where nothing tells the output from the target's distribution: neither enumeration of what
the verifier decides, nor what comes out of the loop, token by token, under the distribution of a
whole forward.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from importlib import import_module
from inspect import isabstract
from itertools import product
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec import recipes
from mmspec import verifiers as shelves
from mmspec.accelerated import Accelerated
from mmspec.api import accelerate
from mmspec.bench import certify
from mmspec.bench.enumeration import TOLERANCE
from mmspec.bench.frequency import chi_square, p_value, refuse_fallback
from mmspec.distributions.sampling import guide
from mmspec.draft import Gate, Kind, RuleSchedule, Verifier
from mmspec.drafters.denoising.window import Window
from mmspec.drafters.jacobi import suffix
from mmspec.drafters.jacobi.suffix import SuffixPolicy
from mmspec.modalities.common.tiny_models import PROMPT, random_drafter, request
from mmspec.modalities.diffusion import tiny_models as chains
from mmspec.modalities.image import tiny_models as drawing
from mmspec.modalities.vlm import tiny_models as writing
from mmspec.recipe import CTC_HEAD, Deferred, Kit, Recipe
from mmspec.trees import Tree
from mmspec.verifiers.beams import StrictBeams
from mmspec.verifiers.compiled import CompiledVerifier
from mmspec.verifiers.enumeration import ancestral_joint, enumerate_joint
from mmspec.verifiers.judge import Judge, JudgedTokens
from mmspec.verifiers.recursive import Recursive
from tests.drafters.jacobi.test_suffix import P, Q, slots
from tests.toys import policies
from tests.verifiers.random_distributions import by_prefix

ROOT = Path(__file__).resolve().parents[2]
SIDE = 10  # codes in a row: more than the window of any recipe that writes rows side by side
PICTURES = 8
TEXTS, LENGTH = 36, 14
SAMPLES = 300  # of chains and of patches
ALPHA = 1e-6  # of one measure; what is drawn is the same in every run
BINS = 10


# Models


@dataclass(frozen=True)
class Said:
    """What a recipe said on a model that is counted, and the distribution of each token of it."""

    tokens: Tensor  # (B, N)
    distributions: Tensor  # (B, N, V) float64

    def differs(self) -> bool:
        """Whether token frequencies differ from the distribution, or their positions do."""
        log = self.distributions.log()
        mean = (self.distributions * log).sum(-1)
        spread = (self.distributions * (log - mean[..., None]).square()).sum().sqrt()
        own = log.gather(-1, self.tokens[..., None])[..., 0]
        z = (own - mean).sum() / spread
        order = self.distributions.argsort(-1, descending=True)
        rank = (order == self.tokens[..., None]).int().argmax(-1)
        ranked = self.distributions.gather(-1, order)
        above = (ranked.cumsum(-1) - ranked).gather(-1, rank[..., None])[..., 0]
        chance = torch.rand(own.shape, generator=torch.Generator().manual_seed(0)).double()
        place = ((above + chance * own.exp()) * BINS).long().clamp_max(BINS - 1)
        counts, expected = place.flatten().bincount(minlength=BINS), place.numel() / BINS
        statistic = float(((counts - expected).square() / expected).sum())
        return min(p_value(statistic, BINS - 1), float(torch.erfc(z.abs() / 2**0.5))) < ALPHA


@lru_cache(maxsize=1)
def painter() -> Any:
    return drawing.tiny_model(side=SIDE)


def on_pictures(plan: Recipe) -> Accelerated:
    target = painter()
    if not plan.takes_drafter:
        return accelerate(target, plan)
    return accelerate(target, plan, drafter=random_drafter(plan, target, seed=1))


@torch.no_grad()
def drawn(fast: Accelerated) -> Said:
    out = fast.generate_images(**drawing.class_request(PICTURES), **drawing.SETTINGS, seed=0)
    refuse_fallback(out.stats)
    model, codes, both = fast.model, out.sequences, []
    for number in (drawing.CLASS, model.config.num_classes):
        slot = model.model.condition(torch.full((PICTURES, 1), number))
        embeds = torch.cat((slot, model.model.embed_tokens(codes[:, :-1])), 1)
        both.append(model(inputs_embeds=embeds).logits.double())
    scores = guide(both[0], both[1], drawing.SETTINGS["guidance"])
    return Said(codes, scores.softmax(-1))


def on_texts(plan: Recipe) -> Accelerated:
    return writing.bind_recipe(plan, 0)


@torch.no_grad()
def written(fast: Accelerated) -> Said:
    settings = {**writing.SAMPLED, "max_new_tokens": LENGTH}
    out = fast.generate(**request(TEXTS), **settings, seed=0)
    refuse_fallback(out.stats)
    distributions = fast.model(input_ids=out.sequences).logits.double().softmax(-1)
    return Said(out.sequences[:, len(PROMPT) :], distributions[:, len(PROMPT) - 1 : -1])


MODELS = ((on_texts, written), (on_pictures, drawn))  # the cheaper one first


@lru_cache(maxsize=2)
def plainly(place: int) -> Tensor:  # (B, N)
    """What plain decoding says there."""
    bind, speak = MODELS[place]
    return speak(bind(recipes.get("plain"))).tokens


# What there is


def shelf() -> list[ModuleType]:
    return [import_module(f"mmspec.verifiers.{one.name}") for one in iter_modules(shelves.__path__)]


def labelled(module: ModuleType, label: str) -> list[Any]:
    """Classes of a module that say so."""
    own = [kind for kind in vars(module).values() if isinstance(kind, type) and is_dataclass(kind)]
    return [kind for kind in own if kind.__module__ == module.__name__ and label in vars(kind)]


# Measures


def smooth(seed: int, size: int) -> Callable[[tuple[int, ...]], Tensor]:
    """Distributions that depend on the whole prefix and hold small probabilities."""

    def at(prefix: tuple[int, ...]) -> Tensor:
        draw = random.Random(f"{seed} {prefix}")
        scores = torch.tensor([draw.gauss(0, 1.5) for _ in range(size)], dtype=torch.float64)
        return scores.softmax(-1)

    return at


_enumerated: dict[str, bool | None] = {}


def enumerated(verifier: Verifier) -> bool | None:
    """Whether what it decides changes the distribution; None where that cannot be enumerated."""
    if repr(verifier) not in _enumerated:  # several recipes stand on the same one
        _enumerated[repr(verifier)] = deviates(verifier)
    return _enumerated[repr(verifier)]


def deviates(verifier: Verifier) -> bool | None:
    worst, size = 0.0, drawing.CODES
    kinds = [kind for kind in verifier.kinds if kind is not Kind.RACE]
    trees = [Tree.chain(1), Tree.chain(2), *[Tree.branching([2])][: verifier.uses_trees]]
    try:
        for tree, kind, distributions, seed in product(trees, kinds, (by_prefix, smooth), range(3)):
            if worst > TOLERANCE:  # the smallest tree that shows it is enough
                break
            p, q = distributions(seed, size), distributions(seed + 1000, size)
            found = enumerate_joint(p, q, verifier, tree, kind)
            worst = max(worst, float((found - ancestral_joint(p, tree.depth + 1)).abs().max()))
    except ValueError:  # noise of positions, or cells of a picture
        return None
    return worst > TOLERANCE if kinds else None


def differs(plan: Recipe) -> tuple[bool, list[Accelerated], str]:
    """Whether a recipe emits another distribution, where it was bound, and why not elsewhere."""
    found, refused, loss = list[Accelerated](), "", False
    for place, (bind, speak) in enumerate(MODELS):
        try:
            fast = bind(plan)
            said = speak(fast)
        except ValueError as error:
            refused += f"{error}; "
            continue
        found.append(fast)
        verifier = fast.recipe.verifier
        assert isinstance(verifier, Verifier)  # it is bound
        told = enumerated(verifier)
        if told is None and fast.recipe.gate is None:  # the noise of positions is plain decoding's
            told = not torch.equal(said.tokens, plainly(place))
        loss = loss or bool(told) or said.differs()
    return loss, found, refused


# one drafts from a text, one keeps what has moved; their own tests show what that loses
TOLD = ("hsd-tolerance", "lvspec")
NAMES = [name for name in recipes.names("tokens") if name not in TOLD]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_of_tokens_is_what_it_says(name: str) -> None:
    """One that says lossy differs somewhere at its defaults, one that says exact nowhere."""
    loss, found, refused = differs(recipes.get(name))
    if not found:
        pytest.skip(f"no model that is counted takes it: {refused}")
    assert {fast.recipe.exact for fast in found} == {not loss}
    if loss and any(fast.last_stats and fast.last_stats.num_spec_steps for fast in found):
        tells = any(mass(fast) is not None for fast in found)
        assert tells == (f"`{name}`" not in unmeasured())


def mass(fast: Accelerated) -> float | None:
    assert fast.last_stats is not None
    return fast.last_stats.over_accepted_mass


def unmeasured() -> str:
    """Where the guide names the recipes that do not measure their loss."""
    guide = (ROOT / "docs" / "index.md").read_text()
    return next(line for line in guide.split(". ") if "measure no such mass" in line)


GATED = {name: recipes.get(name) for name in recipes.names()}
GATES = [
    name
    for name, one in GATED.items()
    if one.gate is not None and one.decodes == "tokens" and CTC_HEAD not in one.needs
]
ACTING = [name for name in recipes.names("actions") if GATED[name].gate is not None]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", GATES)
def test_a_gate_alone_is_what_the_recipe_says(name: str) -> None:
    """Beside a verifier that is exact; every gate that there is stands in some recipe."""
    loss, found, _ = differs(replace(recipes.get(name), verifier=Recursive()))
    assert {fast.recipe.exact for fast in found} == {not loss}


def test_every_gate_stands_in_a_recipe() -> None:
    reached = {
        type(bind(recipes.get(name)).recipe.gate) for name in GATES for bind, _ in MODELS[1:]
    }
    reached |= {type(policies.robot(name).gate) for name in ACTING}  # judged in test_actions
    assert {*gates()} == reached


def gates() -> list[type[Gate]]:
    found = [kind for module in shelf() for kind in vars(module).values() if isinstance(kind, type)]
    return [kind for kind in found if issubclass(kind, Gate) and not isabstract(kind)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*recipes.names("latents"), *recipes.names("patches")])
def test_a_recipe_of_numbers_is_what_it_says(name: str) -> None:
    """What is made of its options is judged by its own label."""
    plan = made(recipes.get(name))
    found = certify(plan, seeds=2, samples=SAMPLES)
    loss = {"lossy", "refuted"} & {check.outcome for check in found.checks}
    assert plan.exact == (not loss and not strays(plan))


def strays(plan: Recipe) -> bool:
    """Whether a chain without noise, whose distribution is one picture, comes out as another."""
    if not isinstance(plan.execution, Window):
        return False
    noisy = chains.settings()[0]
    still = noisy.kernel.deterministic(torch.ones(noisy.kernel.num_steps, dtype=torch.bool))
    silent = replace(noisy, kernel=still)
    found, wanted = chains.sample(plan, silent, range(4)), chains.sample_reference(silent, range(4))
    return not torch.allclose(found.states, wanted.states, atol=1e-4)


POLICIES = [kind() for kind in labelled(suffix, "records_distribution")]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_the_distribution_of_a_redrawn_token_is_recorded_where_that_is_said(
    policy: SuffixPolicy,
) -> None:
    """A token must be a sample of the distribution that is stored with it."""
    before, noise = slots(40_000, P, Q)
    tokens, distribution = policy.redraw(before, noise.at_round(1))
    each, which = distribution.probs[:, 0].unique(dim=0, return_inverse=True)
    found = []
    for index, one in enumerate(each):
        counts = tokens[which == index, 0].bincount(minlength=len(one))
        statistic, cells = chi_square(counts, one * counts.sum())
        found.append(p_value(statistic, cells - 1) >= ALPHA)
    assert policy.records_distribution == all(found)


@pytest.mark.parametrize("reuse", suffix.REUSE)
def test_a_recipe_is_as_exact_as_what_its_drafter_records(reuse: str) -> None:
    """In the loop the loss is small; the policy itself is measured above."""
    plan = recipes.get("sjd-pp")
    fast = on_texts(replace(plan, options={**plan.options, "reuse": reuse}))
    assert fast.recipe.exact == suffix.REUSE[reuse](1.0).records_distribution


@pytest.mark.exhaustive
def test_every_label_belongs_to_a_part_that_was_measured() -> None:
    """Most stand in a recipe; rules are judged without its walk, and what is left by itself."""
    reached = {repr(one): one for n in recipes.names() for part in parts(n) for one in inside(part)}
    labels = {kind for module in shelf() for kind in labelled(module, "lossless")}
    labels.discard(CompiledVerifier)  # has the label of the verifier that it runs
    labels -= {
        StrictBeams,
        Judge,
        JudgedTokens,
    }  # beams, a trained head: tests of their own
    assert len(labels) > 25
    rules = [one for one in reached.values() if "accept" in vars(type(one))]
    losses = {type(one) for one in rules if enumerated(Recursive(one))}
    for rule in rules:  # one that says lossy differs on some model
        assert rule.lossless == (type(rule) not in losses), rule
    apart = [
        one.verifier for one in GATED.values() if CTC_HEAD in one.needs
    ]  # these have tests of their own
    for kind in labels - {type(one) for one in (*reached.values(), *apart)}:
        alone = Recursive(kind()) if "accept" in vars(kind) else kind()
        told = enumerated(alone) if Kind.DET in alone.kinds else None
        if told is None:
            judged = replace(recipes.get("asd"), verifier=alone)
            told = certify(judged, seeds=2, samples=SAMPLES).verdict != "exact"
        assert alone.lossless == (not told)


def parts(name: str) -> Iterator[Any]:
    """What decides in a recipe, made for the models that it can be bound to."""
    plan = recipes.get(name)
    if plan.decodes != "tokens":
        yield made(plan).verifier
        return
    for bind, _ in MODELS:
        with suppress(ValueError):
            yield bind(plan).recipe.verifier


def made(plan: Recipe) -> Recipe:
    """With its verifier as it is made of the options alone."""
    if not isinstance(plan.verifier, Deferred):
        return plan
    space = policies.SPACE if plan.decodes == "actions" else None
    kit = Kit(None, None, plan.execution, plan.sees, options=plan.options, actions=space)
    return replace(plan, verifier=plan.verifier.make(kit))


def inside(part: Any) -> Iterator[Any]:
    """A part and all that it is made of; of a schedule, also a rule."""
    yield part
    if isinstance(part, RuleSchedule):
        yield part.at(0, 1)
    for one in fields(part) if is_dataclass(part) else ():
        yield from inside(getattr(part, one.name))
