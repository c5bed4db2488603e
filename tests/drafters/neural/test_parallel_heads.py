"""Heads that draft a block in one run: what they read, exactness, what drafts depend on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import mmspec
from mmspec import recipes
from mmspec.bench.frequency import chi_square
from mmspec.distributions.categorical import Categorical
from mmspec.drafters.draft_model import draft_distribution
from mmspec.drafters.neural import dflash
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.drafters.parallel_chain import ParallelChain
from mmspec.modalities.common.tiny_models import (
    joint_distribution,
    random_drafter,
    request,
    tiny_llama,
)
from mmspec.targets.tokens.context import Context
from mmspec.verifiers.exact import Exact
from mmspec.verifiers.recursive import Recursive
from tests import toys
from tests.covering import covering, exhaustive, limited
from tests.drafters.parallel_heads import (
    DRAFTS,
    ROOM,
    Late,
    Recorder,
    new_head,
    record,
    slow,
    trained_head,
)
from tests.drafters.state_heads import target
from tests.toys.image_models import PAINTERS
from tests.toys.image_models import request as image_request
from tests.toys.readers import backbone

NAMES = exhaustive(("amphista", "dflash", "p-eagle"), ("dflash", "p-eagle"))
SHAPES: list[dict[str, Any]] = [{}, {"length": 2}, {"tree": [2, 2, 1]}, {"tree": "parallel"}]
READS: list[tuple[str, str, dict[str, Any]]] = [
    ("dflash", "llava", {}),
    ("dflash", "llava", {"visual_slots": "hidden"}),
    ("dflash", "qwen2_5_vl", {"positions": "mrope"}),
    ("dflash", "gemma3", {"draft_vocab_size": 40}),
    ("p-eagle", "llava", {}),
    ("p-eagle", "llava", {"visual_slots": "fused", "num_hidden_layers": 2}),
    ("p-eagle", "qwen2_5_vl", {"positions": "mrope", "own_embeddings": True}),
    ("p-eagle", "gemma3", {"sliding_window": 4, "draft_vocab_size": 40}),
]
AMPHISTA: list[tuple[str, str, dict[str, Any]]] = [
    ("amphista", "llava", {}),
    ("amphista", "llava", {"visual_slots": "hidden", "num_hidden_layers": 3}),
    ("amphista", "qwen2_5_vl", {"positions": "mrope"}),
]


# --- what they read -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "batch"),
    limited(
        [
            *covering(READS, (3, 1), strength=1),
            *covering(AMPHISTA, (3, 1), strength=1, by_default=False),
        ],
        4,
    ),
    ids=str,
)
def test_a_block_is_that_of_the_committed_tokens(
    case: tuple[str, str, dict[str, Any]], batch: int
) -> None:
    """From a cache that grows in rounds, on ragged rows; late states are found."""
    name, family, parts = case
    head = wide_head(name, family, **parts)
    check(name, family, head, batch, record(name, family, head, batch, Recorder))
    with pytest.raises(AssertionError, match="not close"):
        check(name, family, head, batch, record(name, family, head, batch, Late))


def test_a_block_of_dflash_attends_to_itself_in_both_directions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: with a causal block the distributions are others."""
    head = wide_head("dflash", "llava")
    monkeypatch.setattr(dflash, "replace", lambda layout, **parts: layout)
    found = record("dflash", "llava", head, 1, Recorder)
    with pytest.raises(AssertionError, match="not close"):
        check("dflash", "llava", head, 1, found)


def check(name: str, family: str, head: Any, batch: int, recorder: Recorder) -> None:
    compared = 0
    for ours, theirs in slow(name, family, head, batch, recorder):
        assert_close(ours.log_softmax(-1), theirs.log_softmax(-1), atol=1e-4, rtol=1e-4)
        compared += 1
    assert compared > batch


def wide_head(name: str, family: str, **parts: Any) -> Any:
    """A head whose output depends on all of its inputs."""
    head, generator = new_head(name, family, **parts), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in head.parameters():
            if weight.dim() == 2:
                weight.normal_(0, 1.2 / weight.shape[1] ** 0.5, generator=generator)
    return head


# --- exactness ------------------------------------------------------------------------------------


class FromTarget(Exact):
    """Wrong: it corrects from the target's distribution where the residual belongs."""

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        return p


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_the_joint_distribution_of_four_tokens_is_the_targets(name: str) -> None:
    """Chi-square over all sequences of a tiny model; z > 3 has a chance of about 0.4 % a case.

    A rule that corrects from p is far off.
    """
    assert abs(z_score(name, None)) < 3
    assert z_score(name, Recursive(FromTarget())) > 6


def z_score(name: str, verifier: Any, rows: int = 3_000) -> float:
    model, room, size = tiny_llama(4, seed=3), 4, 4
    head = random_drafter(recipes.get(name), model, 4)
    fast = mmspec.accelerate(model, name, drafter=head, verifier=verifier)
    distribution = joint_distribution(model, room).flatten()
    powers = size ** torch.arange(room - 1, -1, -1)
    how = {"temperature": 1.0, "top_k": 0, "max_new_tokens": room, "seed": 7}
    out = fast.generate(**request(rows), **how, row_ids=list(range(rows)))
    assert out.stats.fallback is None
    assert out.stats.num_accepted_draft_tokens > 0
    found = (out.sequences[:, -room:] * powers).sum(-1)
    counts = torch.bincount(found, minlength=size**room).double()
    statistic, cells = chi_square(counts, distribution * rows)
    return float((statistic - (cells - 1)) / (2 * (cells - 1)) ** 0.5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", exhaustive(SHAPES, SHAPES[1::2]))
def test_output_is_the_targets_with_every_shape(name: str, how: dict[str, Any]) -> None:
    given = toys.inputs("llava", batch=3, ragged=True)
    expected = mmspec.decode_plain(
        target("llava"), **given, max_new_tokens=ROOM, do_sample=False
    ).sequences
    verifier = {"verifier": "coupled"} if how.get("tree") == "parallel" else {}
    head = trained_head(name, "llava")
    fast = mmspec.accelerate(target("llava"), name, drafter=head, **how, **verifier)
    out = fast.generate(**given, max_new_tokens=ROOM, do_sample=False)
    assert torch.equal(out.sequences, expected)
    assert out.stats.fallback is None
    assert out.stats.num_accepted_draft_tokens > 0


@pytest.mark.parametrize("name", NAMES)
def test_sampled_output_of_coupled_noise_is_plain_decodings(name: str) -> None:
    given = toys.inputs("llava", batch=3, ragged=True)
    how = {"do_sample": True, "temperature": 0.5, "top_k": 3, "repetition_penalty": 1.3, "seed": 3}
    plain = mmspec.decode_plain(target("llava"), **given, max_new_tokens=ROOM, **how).sequences
    head = trained_head(name, "llava")
    fast = mmspec.accelerate(target("llava"), name, drafter=head, verifier="coupled")
    out = fast.generate(**given, max_new_tokens=ROOM, **how)
    assert torch.equal(out.sequences, plain)


@pytest.mark.parametrize("name", NAMES)
def test_both_branches_of_guidance_are_read(name: str) -> None:
    """An image model with a guidance scale: the target's own picture, also sampled."""
    model, given = PAINTERS["janus"](), image_request("janus", 2)
    head = random_drafter(recipes.get(name), model, 1)
    fast = mmspec.accelerate(model, name, drafter=head, verifier="coupled")
    plain = mmspec.accelerate(model, "plain")
    how = {"guidance": 3.0, "temperature": 1.0, "seed": 0}
    out = fast.generate_images(**given, **how)
    assert out.stats.fallback is None
    assert torch.equal(out.sequences, plain.generate_images(**given, **how).sequences)


# --- what a trained one depends on ----------------------------------------------------------------


def test_acceptance_of_dflash_needs_its_mask_token() -> None:
    """Trained beats untrained; masks embedded as another token lose most of it."""
    head = trained_head("dflash", "llava")
    swapped = copy.deepcopy(head)
    swapped.config.mask_token_id = toys.WORDS.start + 3
    kept = accepted("dflash", head)
    assert kept > 2 * accepted("dflash", new_head("dflash", "llava")) + 4
    assert accepted("dflash", swapped) < 0.7 * kept


def test_acceptance_of_p_eagle_needs_its_learned_state() -> None:
    head = trained_head("p-eagle", "llava")
    swapped = copy.deepcopy(head)
    with torch.no_grad():
        swapped.mask_hidden.neg_()
    kept = accepted("p-eagle", head)
    assert kept > 2 * accepted("p-eagle", new_head("p-eagle", "llava")) + 4
    assert accepted("p-eagle", swapped) < 0.85 * kept


class Shifted(Recorder):
    """Wrong: every token is drafted by the slot after its own."""

    def predict_first(self, context: Context, state: Any) -> Categorical:
        super().predict_first(context, state)
        state.logits = state.logits.roll(-1, 1)
        return draft_distribution(context, state.logits[:, :1], None)


@pytest.mark.parametrize("name", NAMES)
def test_acceptance_needs_the_slot_of_the_position(name: str) -> None:
    given, found = toys.inputs("llava", batch=3, ragged=True), []
    for wrap in (Recorder, Shifted):
        draft = wrap(DRAFTS[name](backbone(target("llava")), trained_head(name, "llava")))
        drafter = Autoregressive(draft, ParallelChain(4))
        fast = mmspec.accelerate(target("llava"), name, drafter=drafter)
        out = fast.generate(**given, max_new_tokens=ROOM, do_sample=False)
        found.append(out.stats.num_accepted_draft_tokens)
    assert found[1] < 0.5 * found[0]


def accepted(recipe: Any, head: Any) -> int:
    """Accepted tokens of greedy drafts on the answers that heads are trained on."""
    given = toys.inputs("llava", batch=3, ragged=True)
    fast = mmspec.accelerate(target("llava"), recipe, drafter=head)
    stats = fast.generate(**given, max_new_tokens=ROOM, do_sample=False).stats
    return int(stats.num_accepted_draft_tokens)


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_heads_of_other_targets_are_refused(name: str) -> None:
    for changes, words in (
        ({"hidden_size": 48}, "wide"),
        ({"vocab_size": 1000}, "tokens"),
        (
            {
                "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]},
                "positions": "mrope",
            },
            "M-RoPE",
        ),
    ):
        head = remade(name, **changes)
        with pytest.raises(ValueError, match=words):
            mmspec.accelerate(target("llava"), name, drafter=head)


def remade(name: str, **changes: Any) -> Any:
    head = new_head(name, "llava")
    config = type(head.config)(**{**head.config.to_dict(), "head_dim": 16, **changes})
    return type(head)(config)


def test_drafts_longer_than_a_block_are_refused() -> None:
    head = new_head("dflash", "llava")
    with pytest.raises(ValueError, match="predicts the next 4 only; give length=4"):
        mmspec.accelerate(target("llava"), "dflash", drafter=head, length=5)


def test_heads_are_not_taken_for_each_other() -> None:
    for name, other in (("eagle-3", "p-eagle"), ("p-eagle", "dflash")):
        with pytest.raises(ValueError, match="head, and drafter= is a"):
            mmspec.accelerate(target("llava"), name, drafter=new_head(other, "llava"))


def test_settings_that_mean_nothing_are_refused() -> None:
    for name, changes, words in (
        ("dflash", {"visual_slots": "placeholder"}, "'fused' or 'hidden'"),
        ("dflash", {"block_size": 1}, "at least 2"),
        ("dflash", {"mask_token_id": 10**6}, "not a token"),
        ("dflash", {"sliding_window": 3}, "no effect"),
        ("dflash", {"tapped_layers": [1, 2]}, "num_taps=3"),
        ("p-eagle", {"num_depths": 0}, "at least 1"),
        ("p-eagle", {"own_embeddings": True, "visual_slots": "fused"}, "own_embeddings"),
    ):
        with pytest.raises(ValueError, match=words):
            new_head(name, "llava", **changes)
