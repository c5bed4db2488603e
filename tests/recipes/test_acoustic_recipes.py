"""SSD and PCG: exact at one end of their option, with control ids out of the bargain."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmspec
from mmspec.modalities.common.families import make_reader
from mmspec.targets.tokens.context import control_ids
from mmspec.verifiers.additive_tolerance import AdditiveTolerance
from mmspec.verifiers.coarse_groups import CoarseGroups
from mmspec.verifiers.recursive import Recursive
from tests import toys
from tests.partners import noisy

SETTINGS: dict[str, Any] = {"max_new_tokens": 16, "temperature": 1.0, "seed": 3}
SIZE = int(toys.model("llama").config.vocab_size)


def bound(name: str, **options: Any) -> mmspec.Accelerated:
    return mmspec.accelerate(
        toys.model("llama"), name, drafter=noisy("llama", scale=0.2), **options
    )


def rule_of(fast: mmspec.Accelerated) -> Any:
    assert isinstance(fast.recipe.verifier, Recursive)
    return fast.recipe.verifier.rule


@pytest.mark.parametrize(("name", "exact"), [("ssd", {"beta": 0}), ("pcg", {"threshold": 1.5})])
def test_at_the_end_of_the_option_it_is_speculative_sampling(name: str, exact: Any) -> None:
    request = toys.inputs("llama", batch=2)
    wanted = bound("speculative-sampling", length=3).generate(**request, **SETTINGS)
    found = bound(name, **exact).generate(**request, **SETTINGS)
    assert torch.equal(found.sequences, wanted.sequences)
    assert found.stats.mean_acceptance_length == wanted.stats.mean_acceptance_length


def test_more_tolerance_accepts_more_and_says_what_it_costs() -> None:
    request = toys.inputs("llama", batch=2)
    runs = [bound("ssd", beta=beta).generate(**request, **SETTINGS) for beta in (0.0, 0.5, 1.0)]
    lengths = [run.stats.mean_acceptance_length for run in runs]
    assert lengths == sorted(set(lengths))
    assert runs[-1].stats.mean_acceptance_length == pytest.approx(4, abs=0.5)  # all three and one
    masses = [run.stats.over_accepted_mass for run in runs]
    assert masses[0] == pytest.approx(0, abs=1e-6)
    assert 0 < masses[1] < masses[2]


def test_control_ids_of_the_model_and_of_the_user_are_exempt() -> None:
    rule = rule_of(bound("ssd", control=(11, 12)))
    assert isinstance(rule, AdditiveTolerance)
    toy = toys.model("llama")
    reader = make_reader(toys.model("llama"))
    named = vars(toy.config) | vars(toy.generation_config)
    ids = {named[f"{kind}_token_id"] for kind in ("pad", "bos", "eos")} - {None}
    assert ids <= control_ids(reader)
    assert set(rule.exempt) == control_ids(reader) | {11, 12}


def test_groups_are_made_of_the_model_s_embeddings() -> None:
    rule = rule_of(bound("pcg", threshold=0.3, control=(11,)))
    assert isinstance(rule, CoarseGroups)
    rows = toys.model("llama").get_input_embeddings().weight
    unit = torch.nn.functional.normalize(rows.double(), dim=-1)
    alone = sorted(control_ids(make_reader(toys.model("llama"))) | {11})
    near = unit @ unit.T >= 0.3
    near[alone] = near[:, alone] = False
    near.fill_diagonal_(True)
    assert torch.equal(rule.groups.shares, near.sum(0))
    assert int(rule.groups.shares.max()) > 1
    assert not bound("pcg", threshold=0.3).recipe.exact
