"""Heads of the surveys at every entry: trained, saved, streamed, served, and in a second turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mmspec
from mmspec import recipes
from mmspec.modalities.common.tiny_models import random_drafter
from mmspec.training.trainable import train_head
from mmspec.verifiers.recursive import Recursive
from tests import toys
from tests.drafters.heads import endless
from tests.drafters.neural.test_parallel_heads import FromTarget, z_score
from tests.drafters.state_heads import lesson, target
from tests.serving.test_engine import accelerated, compare_with_alone, mixed_requests
from tests.targets.tokens.test_turns import GREEDY, two_turns
from tests.toys.readers import backbone

pytestmark = pytest.mark.exhaustive
RATES = {
    "amphista": 4e-3,
    "ctc-drafter": 1e-2,
    "falcon": 4e-3,
    "mixture-of-attentions": 4e-3,
    "owl": 1e-2,
    "pass-sampling": 0.3,
}
NAMES = tuple(RATES)
SAMPLED: dict[str, Any] = {"max_new_tokens": 9, "temperature": 1.0, "top_k": 30, "seed": 3}


def new_head(name: str, family: str = "llava") -> Any:
    training: Any = recipes.get(name).training
    reader = backbone(target(family))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head: nn.Module = training.begin(reader, torch.ones(reader.vocabulary, dtype=torch.int64))
    return head.train(False)


@pytest.mark.parametrize("name", NAMES)
def test_training_lowers_the_loss_and_raises_acceptance(name: str) -> None:
    example, reader, seen = lesson("llava", 3), backbone(target("llava")), list[float]()
    training: Any = recipes.get(name).training
    head, kept = new_head(name), list[int]()
    reader.model.zero_grad()  # of other tests
    for steps in (0, 50):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            report = lambda *one: seen.append(one[3])  # noqa: E731
            train_head(training, reader, head, endless(example), steps, RATES[name], report)
        fast = mmspec.accelerate(target("llava"), name, drafter=head)
        out = fast.generate(**example.inputs, max_new_tokens=10, do_sample=False)
        assert torch.equal(out.sequences[:, -10:], example.tokens)
        kept.append(out.stats.num_accepted_draft_tokens)
    assert seen[-1] < 0.85 * seen[0]
    assert kept[1] > kept[0] + 3
    assert all(weight.requires_grad and weight.grad is None for weight in reader.model.parameters())


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3"])
@pytest.mark.parametrize("name", NAMES)
def test_output_is_plain_decodings(name: str, family: str) -> None:
    """Greedy, and sampled with coupled noise, on ragged rows with pictures."""
    given = toys.inputs(family, batch=3, ragged=True)
    head = random_drafter(recipes.get(name), target(family), 1)
    fast = mmspec.accelerate(target(family), name, drafter=head, verifier="coupled")
    for how in ({"do_sample": False, "max_new_tokens": 9}, SAMPLED):
        out = fast.generate(**given, **how)
        assert out.stats.fallback is None
        plain = mmspec.decode_plain(target(family), **given, **how)
        assert torch.equal(out.sequences, plain.sequences)


@pytest.mark.parametrize("family", ["llava", "llama"])
@pytest.mark.parametrize("name", NAMES)
def test_a_saved_folder_drafts_as_before(name: str, family: str, tmp_path: Path) -> None:
    """Text only and with a picture; streamed, and called by `generate()` of the model."""
    head, given = random_drafter(recipes.get(name), target(family), 1), toys.inputs(family)
    fast = mmspec.accelerate(target(family), name, drafter=head)
    fast.save_pretrained(tmp_path / "all")
    head.save_pretrained(tmp_path / "head")
    out = fast.generate(**given, **SAMPLED)
    again = mmspec.load(tmp_path / "all", target(family)).generate(**given, **SAMPLED)
    named = mmspec.accelerate(target(family), name, drafter=str(tmp_path / "head"))
    for other in (again, named.generate(**given, **SAMPLED)):
        assert torch.equal(other.sequences, out.sequences)
        assert other.stats.per_step_accepted == out.stats.per_step_accepted
    new = [token for one in fast.stream(**given, **SAMPLED) for token in one.tokens[0]]
    ids = given["input_ids"].shape[1]
    assert new[-9:] == out.sequences[0, ids:].tolist()
    called = target(family).generate(**given, **GREEDY, custom_generate=fast)
    assert torch.equal(called, target(family).generate(**given, **GREEDY))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_second_turn_on_a_used_cache(name: str, batch: int) -> None:
    model = target("llava")
    requests, expected = two_turns(model, toys.inputs("llava", batch=batch))
    fast = mmspec.accelerate(model, name, drafter=random_drafter(recipes.get(name), model, 1))
    cache = None
    for asked, said in zip(requests, expected, strict=True):
        out = fast.generate(**asked, **GREEDY, past_key_values=cache, return_dict_in_generate=True)
        assert out.stats.fallback is None
        assert torch.equal(out.sequences, said.sequences)
        cache = out.past_key_values


@pytest.mark.parametrize("name", NAMES)
def test_the_joint_distribution_of_four_tokens_is_the_targets(name: str) -> None:
    """Chi-square over all sequences; correcting from p, not from the residual, is far off."""
    rows = 400 if name == "ctc-drafter" else 3_000  # its search is in Python, row by row
    assert abs(z_score(name, None, rows)) < 3
    assert z_score(name, Recursive(FromTarget()), rows) > 6


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_an_engine_come_and_go(name: str) -> None:
    compare_with_alone(accelerated("llava", name), mixed_requests("llava", 9))
