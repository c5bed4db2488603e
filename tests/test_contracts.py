"""Optional members of a part are declared with a default; no caller probes for them."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest

from mmspec._attributes import default_property
from mmspec.distributions.noise import Noise
from mmspec.draft import Draft, Drafter, Gate, Kind, Rule, Scores, Verdict, Verifier
from mmspec.drafters.draft_model import DraftModel
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.lookup.prompt_lookup import PromptLookup
from mmspec.drafters.neural.draft_inputs import DraftInputs, TextInputs
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.drafters.plain import NoDraft
from mmspec.drafters.shapes import Chain
from mmspec.verifiers.exact import Exact
from mmspec.verifiers.lenience import Lenience
from mmspec.verifiers.longest import Longest
from mmspec.verifiers.recursive import Recursive
from tests.test_layout import ROOT, sources

CONTRACTS = (Drafter, Verifier, Gate, DraftModel, DraftInputs)


@dataclass(frozen=True)
class Bare(Verifier):
    """Says no more than it must."""

    lossless: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET,)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        raise AssertionError


@dataclass(frozen=True)
class Formatting(Bare):
    """Has a field for what is default_property with a default: one needed, one made anew."""

    rule: Rule
    description: str = field(default_factory=lambda: "in other words")


class Closed(Gate):
    """A gate that lets nothing through."""

    def skip(self, context: Any, draft: Draft) -> Verdict | None:
        return None


def test_defaults_are_as_declared() -> None:
    bare, lookup = Bare(), PromptLookup()
    assert (bare.rule, bare.uses_trees, bare.description) == (None, True, "Bare")
    assert (bare.looks_ahead, bare.is_blind, bare.needs_random_steps) == (False, False, False)
    assert (lookup.sees, lookup.required_features, lookup.records_distribution) == (
        "nothing",
        frozenset(),
        True,
    )
    assert (lookup.uses_trees, lookup.carries_tokens) == (False, False)
    assert lookup.with_kind(Kind.DET) is lookup
    assert TextInputs().required_features == frozenset()
    assert "Closed" in Closed().description
    assert Recursive(Lenience(0.5)).description == "Recursive, Lenience(ell=0.5)"


def test_a_field_takes_the_place_of_a_default() -> None:
    """Were the default a property, the field would take it for its own, or refuse a value."""
    formatting = Formatting(Exact())
    assert formatting.rule == Exact()
    assert formatting.description == "in other words"
    assert replace(formatting, description="said").description == "said"
    for needs_a_rule in (Formatting, Longest):
        with pytest.raises(TypeError, match="rule"):
            needs_a_rule()  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="uses_trees is an attribute of instances of Bare"):
        _ = Bare.uses_trees


def test_a_property_without_a_default_is_required() -> None:
    class Mute(NoDraft):
        kinds = Drafter.kinds

    with pytest.raises(TypeError, match="kinds"):
        Mute()


def test_a_drafter_draws_the_requested_kind() -> None:
    model: Any = None
    drafter = Autoregressive(model, Chain(Fixed(3)))
    assert len(drafter.kinds) > 1
    assert drafter.with_kind(Kind.WOR).kinds == (Kind.WOR,)


def names() -> set[str]:
    """All that the contracts declare."""
    found = {name for contract in CONTRACTS for name in vars(contract) if name[0] != "_"}
    assert {
        "sees",
        "required_features",
        "uses_trees",
        "carries_tokens",
        "records_distribution",
        "kinds",
        "rule",
        "description",
    } <= found
    return found | {"lossless", "can_branch"}


def test_declared_properties_are_not_probed() -> None:
    known, probing = names(), []
    for source in sources():
        text = (ROOT / source).read_text()
        if "getattr(" not in text and "hasattr(" not in text:  # reading a tree takes longer
            continue
        for node in ast.walk(ast.parse(text)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            attribute = node.args[1] if len(node.args) > 1 else None
            if node.func.id in ("getattr", "hasattr") and isinstance(attribute, ast.Constant):
                probing += [f"{source}:{node.lineno}"] if attribute.value in known else []
    assert not probing


def test_a_declared_property_has_its_docstring() -> None:
    assert isinstance(vars(Drafter)["sees"], default_property)
    assert vars(Drafter)["sees"].__doc__ == "What of the image it is conditioned on."
