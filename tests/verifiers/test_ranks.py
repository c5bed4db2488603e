"""A rule of ranks under greedy decoding, where p is a point mass with scores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import mmspec
from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import KeyedNoise
from mmspec.draft import Draft, Kind, Scores
from mmspec.trees import Tree
from mmspec.verifiers.distances import measure, total_variation
from mmspec.verifiers.enumeration import ancestral_joint, enumerate_emitted, enumerate_joint
from mmspec.verifiers.longest import Longest
from mmspec.verifiers.recursive import Recursive
from tests import toys
from tests.partners import noisy

ROOM = 40
CPU = torch.device("cpu")


@dataclass(frozen=True)
class TopRanked:
    """Accept tokens among the `most` highest scores of the target."""

    most: int
    lossless: ClassVar[bool] = False

    def accept(self, p: Categorical, q: Categorical, x: Tensor) -> Tensor:
        own = p.scores.gather(-1, x[..., None])
        return ((p.scores > own).sum(-1) < self.most).to(p.probs)

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        return p


def greedy(walk: type[Recursive] | type[Longest], most: int, **shape: Any) -> Any:
    fast = mmspec.accelerate(
        toys.model("llama", layers=2),
        "speculative-sampling",
        drafter=noisy("llama", scale=0.5, layers=2),
        verifier=walk(TopRanked(most)),
        **shape,
    )
    request = toys.inputs("llama", batch=2, ragged=True)
    return fast.generate(**request, max_new_tokens=ROOM, do_sample=False)


@pytest.mark.parametrize(
    ("walk", "shape"),
    [
        pytest.param(Recursive, {"length": 4}, marks=pytest.mark.exhaustive),
        pytest.param(Recursive, {"tree": [2, 2, 1]}, marks=pytest.mark.exhaustive),
        (Longest, {"tree": [2, 2, 1]}),
    ],
    ids=str,
)
def test_greedy_acceptance_grows_with_the_rank(
    walk: type[Recursive] | type[Longest], shape: dict[str, Any]
) -> None:
    outs = [greedy(walk, most, **shape) for most in (1, 3, 10, 1_000_000)]
    assert all(out.stats.fallback is None for out in outs)
    lengths = [out.stats.mean_acceptance_length for out in outs]
    assert all(low < high for low, high in pairwise(lengths))
    assert outs[-1].stats.num_spec_steps < outs[0].stats.num_spec_steps / 2
    request = toys.inputs("llama", batch=2, ragged=True)
    plain = mmspec.decode_plain(
        toys.model("llama", layers=2), **request, max_new_tokens=ROOM, do_sample=False
    )
    assert torch.equal(outs[0].sequences, plain.sequences)
    assert not torch.equal(outs[1].sequences, plain.sequences)


@pytest.mark.parametrize("tree", [Tree.chain(2), Tree.branching([2, 1])], ids=str)
@pytest.mark.parametrize("kind", [Kind.IID, Kind.WOR, Kind.DET])
def test_only_the_first_rank_is_exact(tree: Tree, kind: Kind) -> None:
    scores = torch.tensor([0.3, 2.0, 1.0, -1.0], dtype=torch.float64)
    target, draft = Categorical(scores, hard=True), (-scores).softmax(-1)
    wanted = ancestral_joint(target, tree.depth + 1)
    off = [
        float(total_variation(found.flatten(), wanted.flatten()))
        for most in (1, 2, 3, 4)
        for found in [enumerate_joint(target, draft, Recursive(TopRanked(most)), tree, kind)]
    ]
    assert off[0] == pytest.approx(0, abs=1e-12)
    assert all(low <= high + 1e-12 for low, high in pairwise(off))
    assert off[-1] > 0.5


def test_one_step_under_greedy_decoding_is_off_by_what_the_ranks_let_through() -> None:
    scores = torch.tensor([0.3, 2.0, 1.0, -1.0], dtype=torch.float64)
    q = torch.tensor([0.4, 0.1, 0.2, 0.3], dtype=torch.float64)
    for most, kept in ((1, [1]), (2, [1, 2]), (3, [0, 1, 2]), (9, [0, 1, 2, 3])):
        target, rule = Categorical(scores, hard=True), TopRanked(most)
        step = measure(rule, target, q)
        assert step.accept.nonzero().flatten().tolist() == kept
        assert float(step.distance) == pytest.approx(float(q[kept].sum()) - 0.1, abs=1e-12)
        assert_close(
            step.output, enumerate_emitted(target, q, rule, kind=Kind.IID), atol=1e-12, rtol=0
        )


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("kind", [Kind.WOR, Kind.DET])
def test_a_later_sibling_is_still_ranked(kind: Kind, ragged: bool) -> None:
    """Three siblings of ranks 4, 2 and 1; those refused leave the ranks as they were."""
    scores = torch.tensor([3.0, 2.0, 1.0, 0.0])
    tokens = torch.tensor([[3, 1, 0], [3, 1, 0]])
    q = Categorical(torch.zeros(2, 3, 4)) if kind is Kind.WOR else None
    draft = Draft.from_tree(Tree.branching([3]), tokens, kind, q)
    if ragged:  # the first row has no first sibling
        mask = torch.tensor([[False, True, True], [True, True, True]])
        draft = replace(draft, mask=mask, padded=True, tree=None)
    said = Scores(Categorical(scores.expand(2, 4, -1), hard=True), torch.zeros(2, 4).long())
    for most, path in ((1, 2), (2, 1), (4, 0)):
        verdict = Recursive(TopRanked(most)).verify(draft, said, KeyedNoise.from_seed(0, 2, CPU))
        first = max(path, 1) if ragged else path
        assert verdict.path.tolist() == [[first], [path]]
