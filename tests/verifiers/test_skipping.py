"""Skipped verification: what is accepted, when, and that the target state stays consistent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import mmspec
from mmspec.codes.codebook import Codebook
from mmspec.distributions.noise import KeyedNoise
from mmspec.draft import Draft, Kind, Round, Scores, Verdict
from mmspec.recipe import Deferred
from mmspec.targets.memory import Memory
from mmspec.targets.tokens.causal import CausalTarget
from mmspec.targets.tokens.context import Context
from mmspec.trees import Tree
from mmspec.verifiers.skipping import Policy, SkipNever, Skipping, SkipSimilar, SkipUniformly, paths
from tests import toys
from tests.partners import noisy
from tests.toys import image_models

SIZE = int(toys.model("llama").config.vocab_size)
ROOM = 24
TREE = Tree((-1, -1, 0, 0, 1, 3))  # 0-2, 0-3-5, 1-4
SETTINGS: dict[str, Any] = {"max_new_tokens": ROOM, "temperature": 1.0, "top_k": 0, "seed": 5}


def book() -> Codebook:
    rows = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    return Codebook.from_offset(rows, 5, SIZE)


def accelerate_toy(name: str = "vvs", **options: Any) -> mmspec.Accelerated:
    given = {"codebook": book(), "delta": 0.2, "tree": [2, 2, 1], **options}
    return mmspec.accelerate(toys.model("llama"), name, drafter=noisy("llama", scale=0.2), **given)


def context(
    batch: int = 1, generated: int = 20, skipped: int = 0, index: int = 1, seed: int = 0
) -> Any:
    """The parts of a context that a gate uses."""
    noise = KeyedNoise.from_seed(seed, batch, torch.device("cpu")).at_round(index)
    return SimpleNamespace(
        finished=(False,) * batch,
        num_generated=lambda row: generated,
        num_unverified_rounds=skipped,
        noise=noise,
        device=torch.device("cpu"),
    )


def tree(tokens: Sequence[int], rows: int = 1) -> Draft:
    return Draft.from_tree(TREE, torch.tensor([list(tokens)] * rows), Kind.DET)


def test_paths_lead_from_the_context_to_every_leaf() -> None:
    assert paths(tree(range(6))) == [[[0, 2], [1, 4], [0, 3, 5]]]
    short = replace(tree(range(6)), mask=torch.tensor([[1, 1, 1, 1, 0, 0]]).bool())
    assert paths(short) == [[[1], [0, 2], [0, 3]]]
    nothing = replace(tree(range(6)), mask=torch.zeros(1, 6).bool())
    assert paths(nothing) == [[[]]]
    assert paths(Draft.chain(torch.zeros(2, 3).long(), Kind.DET)) == [[[0, 1, 2]]] * 2


@dataclass(frozen=True)
class Always:
    def should_skip(self, context: Context, draft: Draft) -> bool:
        return True


def test_the_path_is_uniform_and_no_longer_than_the_mean() -> None:
    """3000 rows, three paths: 1000 of each, five standard deviations are 129."""
    verdict = Skipping(Always()).skip(context(3000), tree(range(6), 3000))
    assert verdict is not None
    assert verdict.next is None
    found = Counter(tuple(line) for line in verdict.path.tolist())
    assert set(found) == {(0, 2), (1, 4), (0, 3)}  # (2 + 2 + 3) // 3 tokens of each
    assert all(abs(count - 1000) < 129 for count in found.values())
    assert verdict.length.tolist() == [2] * 3000


def test_when_nothing_may_be_skipped() -> None:
    gate, draft = Skipping(Always(), warm_up=5), tree(range(6))
    assert gate.skip(context(), draft) is not None
    assert gate.skip(context(generated=5), draft) is None  # too early
    assert gate.skip(context(skipped=1), draft) is None  # never twice in a row
    assert gate.skip(context(), Draft.empty(1, torch.device("cpu"))) is None
    assert gate.skip(context(), replace(draft, mask=torch.zeros(1, 6).bool())) is None
    assert Skipping(SkipNever()).skip(context(), draft) is None
    turns = [SkipUniformly(5).should_skip(context(index=turn), draft) for turn in range(12)]
    assert [turn for turn, skipped in enumerate(turns) if skipped] == [1, 6, 11]


def test_likeness_is_the_mean_weighted_cosine_of_pairs() -> None:
    codes = book()
    lines = [[5, 9, 30], [7, 11], [44, 5, 8]]
    total = []
    for i, one in enumerate(lines):
        for other in lines[i + 1 :]:
            weights = [0.9**step for step in range(min(len(one), len(other)))]
            cosines = [
                float(torch.cosine_similarity(codes.vectors[a - 5], codes.vectors[b - 5], dim=0))
                for a, b in zip(one, other, strict=False)
            ]
            shared = sum(w * c for w, c in zip(weights, cosines, strict=True))
            total.append(shared / sum(weights))
    assert SkipSimilar(codes).mean_similarity(lines) == pytest.approx(sum(total) / 3, abs=1e-6)
    assert SkipSimilar(codes).mean_similarity([[5, 9], [5, 9]]) == pytest.approx(1)
    assert SkipSimilar(codes).mean_similarity([[5, 9]]) == -1
    assert SkipSimilar(codes).mean_similarity([[0, 1], [2, 3]]) == 0  # tokens that are no codes


def test_similar_paths_are_skipped() -> None:
    like, unlike = tree([9, 9, 12, 12, 12, 12]), tree([9, 9, 20, 12, 12, 30])
    assert SkipSimilar(book(), 0.99).should_skip(
        context(), like
    )  # of three paths the first and the third
    assert not SkipSimilar(book(), 0.99).should_skip(context(), unlike)
    assert SkipSimilar(book(), 0.0).should_skip(
        context(), tree([0] * 6)
    )  # no codes: 0, which is reached
    assert not SkipSimilar(book(), 0.99).should_skip(context(), Draft.chain(like.tokens, Kind.DET))


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"tree": [2, 2, 1]}, marks=pytest.mark.exhaustive),
        {"tree": "dynamic"},
        {"length": 4},
    ],
    ids=str,
)
def test_never_is_the_base_bit_for_bit(shape: dict[str, Any]) -> None:
    request, given = toys.inputs("llama", batch=2, ragged=True), {"tree": None, **shape}
    base = accelerate_toy("lantern", **given).generate(**request, **SETTINGS)
    never = accelerate_toy(skip="never", **given).generate(**request, **SETTINGS)
    assert torch.equal(never.sequences, base.sequences)
    assert never.stats.per_step_accepted == base.stats.per_step_accepted
    assert never.stats.over_accepted_mass == base.stats.over_accepted_mass
    assert never.stats.unverified_tokens == 0
    skipped = accelerate_toy(interval=2, **given).generate(**request, **SETTINGS)
    assert skipped.stats.unverified_tokens > 0
    assert not torch.equal(skipped.sequences, base.sequences)


@dataclass
class Recorder:
    """A target that records its texts, its distributions at the root, and its final cache."""

    inner: CausalTarget
    seen: list[tuple[tuple[int, ...], list[list[int]], Tensor]] = field(default_factory=list)
    memory: Any = None

    def prefill(self, request: Any) -> Context:
        found = self.inner.prefill(request)
        self.memory = found.memory
        return found

    def score(self, context: Context, draft: Draft) -> Scores:
        scores = self.inner.score(context, draft)
        distribution: Any = scores.distribution
        texts = [list(row) for row in context.history]
        self.seen.append((context.pending, texts, distribution.scores[:, 0]))
        return scores

    def keep(self, context: Context, draft: Draft, kept: Round) -> Context:
        return self.inner.keep(context, draft, kept)


def test_after_a_skip_the_target_knows_the_text() -> None:
    """Distributions and cache equal those of the same tokens decoded without speculation."""
    model, request = toys.model("llama"), toys.inputs("llama", batch=2, ragged=True)
    fast = accelerate_toy(interval=2, tree=Tree((-1, -1, 1, 2)))  # paths of one and of three
    recorder = Recorder(fast.session.bound.target)
    fast.session.bound.target = recorder
    fast.generate(**request, **SETTINGS)
    after = [line for line in recorder.seen if max(line[0]) > 1]
    assert len(after) > 2
    assert any(len(set(pending)) > 1 for pending, _, _ in after)  # rows of different lengths
    for _, texts, distribution in recorder.seen:
        for row, text in enumerate(texts):
            with torch.no_grad():
                expected = model(torch.tensor([text])).logits[0, -1]
            assert_close(distribution[row], expected, atol=1e-3, rtol=1e-3)
    memory: Memory = recorder.memory
    for row, text in enumerate(recorder.seen[-1][1]):
        pad = memory.padding[row]
        count = min(memory.lengths[row] - pad, len(text))
        with torch.no_grad():
            fresh = model(torch.tensor([text[:count]]), use_cache=True).past_key_values
        for mine, theirs in zip(memory.cache.layers, fresh.layers, strict=True):
            for own, true in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
                kept = own[row, :, pad : pad + count]
                assert_close(kept, true[0], atol=1e-3, rtol=1e-3)


def test_forwards_are_rounds_less_the_skipped_ones() -> None:
    request = toys.inputs("llama", batch=2, ragged=True)
    fast = accelerate_toy(interval=3, warm_up=2)
    rounds = list(fast.stream(**request, **SETTINGS))
    skipped = [turn for turn in rounds if turn.is_unverified]
    assert len(skipped) >= 2
    assert all(turn.index % 3 == 1 and turn.calls == 0 for turn in skipped)
    stats = fast.last_stats
    assert stats is not None
    assert stats.fallback is None
    assert stats.target_calls == len(rounds) - 1 - len(skipped)  # the first is the prefill's
    assert stats.unverified_tokens == sum(len(t) for turn in skipped for t in turn.tokens)
    assert stats.num_new_tokens == 2 * ROOM
    assert not stats.exact
    for turn in skipped:
        assert not any(turn.takes_next)


@pytest.mark.parametrize("skip", ["uniform", "similarity"])
def test_images_with_guidance(skip: str) -> None:
    model, small = image_models.janus(), image_models.janus()
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in small.parameters():
            if weight.dim() > 1:
                weight.add_(torch.randn(weight.shape, generator=noise) * weight.std() * 0.1)
    fast = mmspec.accelerate(
        model, "vvs", drafter=small, skip=skip, threshold=-1.0, interval=2, warm_up=2
    )
    out = fast.generate_images(**image_models.request("janus", batch=2), temperature=1.0, seed=3)
    assert out.stats.fallback is None
    assert out.stats.unverified_tokens > 0
    assert "; some rounds skipped" in mmspec.recipes.get("vvs").axes()["verification optimisation"]


def test_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="skip='x' is not known; choose one of uniform, sim"):
        accelerate_toy(skip="x")
    with pytest.raises(ValueError, match="interval=1 would skip every round"):
        accelerate_toy(interval=1)
    with pytest.raises(ValueError, match="threshold=2 is not a cosine"):
        accelerate_toy(skip="similarity", threshold=2)
    with pytest.raises(TypeError, match="compares the vectors of codes"):
        accelerate_toy(skip="similarity", codebook=book().neighbours(9), neighbours=9)
    assert isinstance(mmspec.recipes.get("vvs").gate, Deferred)
    policy: Policy = Always()
    assert accelerate_toy(skip=policy).recipe.gate == Skipping(policy)


def test_a_verdict_without_a_next_token_is_a_skip() -> None:
    path = torch.tensor([[0]])
    kept = Round(
        1, (1,), (1,), ((0,),), (False,), ((3,),), (False,), Verdict(path, path[0] + 1, None)
    )
    assert kept.is_unverified
