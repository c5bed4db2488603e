"""Statistics of a run: counts of hand-made rounds, and identities between the columns."""

from __future__ import annotations

import json
import random

import pytest
import torch

from mmspec.draft import Round, Verdict
from mmspec.stats import Ledger, Stats, forecast_stats


def make_round(rows: list[tuple[int, int, int]], **more: object) -> Round:
    """A round of rows (drafted, accepted, new tokens)."""
    drafted, accepted, new = zip(*rows, strict=True)
    count = torch.tensor(accepted)
    given: dict[str, object] = {
        "index": 1,
        "drafted": drafted,
        "accepted": accepted,
        "path": tuple(tuple(range(number)) for number in accepted),
        "takes_next": (True,) * len(rows),
        "tokens": tuple((7,) * number for number in new),
        "finished": (False,) * len(rows),
        "verdict": Verdict(torch.zeros(len(rows), 1).long(), count, torch.zeros(len(rows)).long()),
        "depth": max(drafted),
        "seconds": {"draft": 0.25, "verify": 0.5},
    }
    return Round(**{**given, **more})  # type: ignore[arg-type]


def collect(*rounds: Round) -> Stats:
    ledger = Ledger("toy", True, "nothing")
    assert list(ledger.follow(rounds)) == list(rounds)
    return ledger.stats()


def prefill(rows: int = 1) -> Round:
    return make_round([(0, 0, 1)] * rows, calls=0, seconds={"prefill": 1.0})


def test_plain_decoding_is_one_token_per_call() -> None:
    found = collect(prefill(), *[make_round([(0, 0, 1)])] * 5)
    assert (found.num_new_tokens, found.target_calls, found.speculation_off_steps) == (6, 5, 5)
    assert (found.tokens_per_target_call, found.mean_acceptance_length) == (1, 1)
    assert (found.acceptance_histogram, found.num_spec_steps) == ([0], 0)
    assert found.total_seconds == pytest.approx(1 + 5 * 0.75)


def test_a_prefill_that_verifies_is_reported_and_no_call() -> None:
    opened = make_round([(4, 4, 5), (4, 1, 2)], index=0, calls=0)
    found = collect(opened, make_round([(0, 0, 0), (2, 2, 3)]))
    assert (found.prefill_steps, found.num_spec_steps, found.target_calls) == (2, 3, 1)
    assert found.tokens_per_target_call == pytest.approx(10 / 3)
    assert collect(prefill(), make_round([(2, 1, 2)])).prefill_steps == 0


def test_counts_of_chains() -> None:
    found = collect(prefill(2), make_round([(3, 3, 4), (3, 0, 1)]), make_round([(3, 1, 2)] * 2))
    assert (found.num_draft_tokens, found.num_accepted_draft_tokens) == (12, 5)
    assert found.acceptance_histogram == [1, 2, 0, 1]
    assert found.per_position_acceptance == [0.75, 0.25, 0.25]
    assert found.conditional_acceptance == pytest.approx([0.75, 1 / 3, 1])
    assert found.mean_acceptance_length == pytest.approx(1 + 5 / 4)
    assert found.tokens_per_target_call == pytest.approx(9 / 4)


def test_columns_agree_with_each_other() -> None:
    generator = random.Random(0)
    drafts = [generator.randint(1, 5) for _ in range(50)]
    steps = [(drafted, generator.randint(0, drafted)) for drafted in drafts]
    found = collect(*[make_round([(drafted, got, got + 1)]) for drafted, got in steps])
    assert sum(found.acceptance_histogram) == found.num_spec_steps == 50
    weighted = sum(length * count for length, count in enumerate(found.acceptance_histogram))
    assert weighted == found.num_accepted_draft_tokens == sum(found.per_step_accepted)
    assert found.mean_acceptance_length == pytest.approx(1 + sum(found.per_position_acceptance))
    assert found.tokens_per_target_call == pytest.approx(found.mean_acceptance_length)
    by_length = found.acceptance_histogram_by_draft_length
    assert {depth: sum(counts) for depth, counts in by_length.items()} == {
        depth: drafts.count(depth) for depth in sorted(set(drafts))
    }


def test_a_gate_counts_unverified_tokens_and_no_step() -> None:
    skipped = Verdict(torch.zeros(1, 2).long(), torch.tensor([2]), None)
    found = collect(make_round([(2, 2, 2)], verdict=skipped, calls=0), make_round([(2, 1, 2)]))
    assert (found.unverified_tokens, found.num_spec_steps, found.num_new_tokens) == (2, 1, 4)


def test_excess_is_a_mean_per_token_of_the_target() -> None:
    rounds = [make_round([(1, 1, 2)], excess=(0.25,)), make_round([(1, 0, 1)], excess=(0.5,))]
    assert collect(*rounds).over_accepted_mass == pytest.approx(0.25)
    assert collect(make_round([(1, 1, 2)])).over_accepted_mass is None


def test_statistics_of_forecasts() -> None:
    found = forecast_stats("toy", full=10, kept=30, rejected=2, errors=[(3, 0.5)])
    assert (found.num_new_tokens, found.target_calls, found.unverified_tokens) == (40, 10, 30)
    assert found.tokens_per_target_call == 4
    assert found.draft_acceptance_rate == pytest.approx(30 / 32)


def test_statistics_are_plain_data() -> None:
    found = collect(prefill(), make_round([(3, 2, 3)]))
    assert json.loads(json.dumps(found.to_dict()))["num_draft_tokens"] == 3
