"""C2T drafts what its classifier expects to be accepted, and the output is the target's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec.distributions.categorical import Categorical
from mmspec.draft import Kind
from mmspec.drafters.shapes import shape_of
from mmspec.drafters.trees.c2t import C2T, TreeHead, tree_features
from tests import toys
from tests.drafters.driving import context
from tests.drafters.trees.test_dyspec import Bigram
from tests.partners import noisy


class ByDepth(TreeHead):
    """A classifier that accepts the nodes of the first levels."""

    def __init__(self, levels: int) -> None:
        super().__init__()
        self.levels = levels

    def forward(self, features: Tensor) -> Tensor:
        return torch.where(features[..., 2] < math.log(1 + self.levels) - 1e-6, 4.0, -4.0)


class ByProbability(TreeHead):
    """A classifier that takes the probability of a path for its chance."""

    def forward(self, features: Tensor) -> Tensor:
        return features[..., 0].exp().clamp(1e-6, 1 - 1e-6).logit()


class ByEntropy(TreeHead):
    """A classifier that accepts nodes drawn from more uncertain distributions than Q[2]."""

    def forward(self, features: Tensor) -> Tensor:
        return torch.where(features[..., 1] > 0.85, 4.0, -4.0)


class Rising(TreeHead):
    """Wrong of a classifier: deeper nodes are likelier than those above them."""

    def forward(self, features: Tensor) -> Tensor:
        return 3 * features[..., 2] - 2.0


def test_features_of_a_node() -> None:
    found = tree_features(torch.tensor([[-1.0, -50.0]]), torch.tensor([[0.5]]), 1)
    wanted = torch.tensor([[[-1.0, 0.5, math.log(2)], [-12.0, 0.5, math.log(2)]]])
    torch.testing.assert_close(found, wanted)


def drafted(shape: C2T) -> Any:
    now = context([0], [0], vocabulary=3)
    return shape.grow(Bigram(), now, None, None, Kind.DET).draft


def test_the_classifier_decides_which_nodes_are_drafted() -> None:
    """Of tokens with q = .6, .3, .1 and paths of two levels."""
    draft = drafted(C2T(ByProbability(), threshold=0.15, depth=2, beam=3, nodes=20))
    found = draft.tokens[0].tolist(), draft.parents[0].tolist()
    assert found == ([0, 1, 0, 1, 2], [-1, -1, 0, 0, 1])  # .6 .3 .36 .18 and .3 * .6
    assert draft.mask.all()
    shallow = drafted(C2T(ByDepth(1), threshold=0.5, depth=2, beam=3, nodes=20))
    assert shallow.parents.max() == -1
    assert drafted(C2T(ByDepth(0), threshold=0.5, depth=2, beam=3)).nodes == 0


def test_the_entropy_is_that_of_the_distribution_with_the_token() -> None:
    """0.90, 0.90 and 0.80 nats after tokens 0, 1 and 2."""
    draft = drafted(C2T(ByEntropy(), threshold=0.5, depth=2, beam=3, nodes=20))
    assert draft.tokens[0].tolist() == [0, 1, 2, 0, 1, 2, 2, 0, 1]
    assert draft.parents[0, 3:].tolist() == [0, 0, 0, 1, 1, 1]


def test_tokens_without_mass_are_not_drafted() -> None:
    class Certain(Bigram):
        def predict_first(self, context: Any, state: Any) -> Categorical:
            return Categorical(torch.tensor([0.0, -math.inf, -math.inf]).expand(1, 1, 3))

    shape = C2T(ByDepth(1), threshold=0.5, depth=1, beam=3)
    draft = shape.grow(Certain(), context([0], vocabulary=3), None, None, Kind.DET).draft
    assert draft.tokens[0].tolist() == [0]


def test_a_node_is_drafted_only_below_drafted_nodes() -> None:
    assert drafted(C2T(Rising(), threshold=0.3, depth=2, beam=3)).nodes == 0
    kept = drafted(C2T(Rising(), threshold=0.05, depth=2, beam=3, nodes=4))
    assert all(parent < node for node, parent in enumerate(kept.parents[0].tolist()))


@pytest.mark.exhaustive
def test_the_output_is_the_targets_with_ragged_rows(tmp_path: Path) -> None:
    model, drafter = toys.model("llama"), noisy("llama")
    request = toys.inputs("llama", batch=2, ragged=True)
    TreeHead().save(tmp_path / "tree.safetensors")
    for shape in (
        C2T(ByProbability(), threshold=0.05),
        f"c2t:head={tmp_path / 'tree.safetensors'},threshold=0.01,depth=3",
    ):
        fast = mmspec.accelerate(model, "coupled", drafter=drafter, tree=shape)
        out = fast.generate(**request, max_new_tokens=10)
        assert torch.equal(out.sequences, model.generate(**request, max_new_tokens=10))
        assert out.stats.fallback is None
        assert out.stats.mean_acceptance_length > 1.1
        sampled = fast.generate(**request, max_new_tokens=10, do_sample=True, seed=3)
        plain = mmspec.decode_plain(model, **request, max_new_tokens=10, do_sample=True, seed=3)
        assert torch.equal(sampled.sequences, plain.sequences)


def test_what_is_no_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="head is 3; give a TreeHead"):
        C2T(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'c2t' has no default for head; give it"):
        shape_of(None, "c2t", None)
    (tmp_path / "x").write_bytes(b"x" * 40)
    with pytest.raises(ValueError, match=r"holds no tree head .* `mmspec train tree`"):
        shape_of(None, f"c2t:head={tmp_path / 'x'}", None)
