"""What a part may be asked is declared, with a default: nobody probes, nobody is surprised."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest

from mmspec.declared import declared
from mmspec.distributions.noise import Noise
from mmspec.draft import Draft, Drafter, Gate, Kind, Rule, Scores, Verdict, Verifier
from mmspec.drafters.growth import Chain, DraftModel
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.lookup.prompt_lookup import PromptLookup
from mmspec.drafters.neural.sight import Nothing, Sight
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.drafters.plain import Silent
from mmspec.verifiers.exact import Exact
from mmspec.verifiers.lenience import Lenience
from mmspec.verifiers.longest import Longest
from mmspec.verifiers.recursive import Recursive
from tests.test_layout import ROOT, sources

CONTRACTS = (Drafter, Verifier, Gate, DraftModel, Sight)


@dataclass(frozen=True)
class Bare(Verifier):
    """Says no more than it must."""

    lossless: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET,)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        raise AssertionError


@dataclass(frozen=True)
class Formatting(Bare):
    """Has a field for what is declared with a default: one needed, one made anew."""

    rule: Rule
    words: str = field(default_factory=lambda: "in other words")


class Closed(Gate):
    """A gate that lets nothing through."""

    def skip(self, context: Any, draft: Draft) -> Verdict | None:
        return None


def test_defaults_are_as_declared() -> None:
    bare, lookup = Bare(), PromptLookup()
    assert (bare.rule, bare.trees, bare.words) == (None, True, "Bare")
    assert (bare.looks_ahead, bare.blind, bare.random) == (False, False, False)
    assert (lookup.sees, lookup.wants, lookup.records_distribution) == (
        "nothing",
        frozenset(),
        True,
    )
    assert (lookup.trees, lookup.carries) == (False, False)
    assert lookup.drawing(Kind.DET) is lookup
    assert Nothing().wants == frozenset()
    assert "Closed" in Closed().words
    assert Recursive(Lenience(0.5)).words == "Recursive, Lenience(ell=0.5)"


def test_a_field_takes_the_place_of_a_default() -> None:
    """Were the default a property, the field would take it for its own, or refuse a value."""
    formatting = Formatting(Exact())
    assert formatting.rule == Exact()
    assert formatting.words == "in other words"
    assert replace(formatting, words="said").words == "said"
    for needs_a_rule in (Formatting, Longest):
        with pytest.raises(TypeError, match="rule"):
            needs_a_rule()  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="trees is asked of an instance of Bare"):
        _ = Bare.trees


def test_what_has_no_default_must_be_said() -> None:
    class Mute(Silent):
        kinds = Drafter.kinds

    with pytest.raises(TypeError, match="kinds"):
        Mute()


def test_a_drafter_draws_the_kind_it_is_told() -> None:
    model: Any = None
    drafter = Autoregressive(model, Chain(Fixed(3)))
    assert len(drafter.kinds) > 1
    assert drafter.drawing(Kind.WOR).kinds == (Kind.WOR,)


def names() -> set[str]:
    """All that the contracts declare."""
    found = {name for contract in CONTRACTS for name in vars(contract) if name[0] != "_"}
    assert {
        "sees",
        "wants",
        "trees",
        "carries",
        "records_distribution",
        "kinds",
        "rule",
        "words",
    } <= found
    return found | {"lossless", "can_branch"}


def test_nobody_probes_for_what_is_declared() -> None:
    known, probing = names(), []
    for source in sources():
        text = (ROOT / source).read_text()
        if "getattr(" not in text and "hasattr(" not in text:  # reading a tree takes longer
            continue
        for node in ast.walk(ast.parse(text)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            asked = node.args[1] if len(node.args) > 1 else None
            if node.func.id in ("getattr", "hasattr") and isinstance(asked, ast.Constant):
                probing += [f"{source}:{node.lineno}"] if asked.value in known else []
    assert not probing


def test_a_declared_property_says_what_it_is() -> None:
    assert isinstance(vars(Drafter)["sees"], declared)
    assert vars(Drafter)["sees"].__doc__ == "What it sees of the picture."
