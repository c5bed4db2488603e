"""Recycled drafts and two-pass trees: exact after any rejection, with fewer rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec import recipes
from mmspec.distributions.categorical import Categorical
from mmspec.draft import Kind
from mmspec.drafters.draft_model import DraftModel, DraftNodes
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.drafters.recycling_chain import RecyclingChain, find_aligned
from mmspec.drafters.shapes import Chain
from mmspec.drafters.trees.two_pass_tree import TwoPassTree
from mmspec.targets.tokens.context import Context
from tests import toys
from tests.covering import limited
from tests.partners import noisy

ROOM = 14
GREEDY: dict[str, Any] = {"max_new_tokens": ROOM, "do_sample": False}
SAMPLED: dict[str, Any] = {"max_new_tokens": ROOM, "temperature": 1.0, "seed": 4}
SHAPES = {
    "as shipped": RecyclingChain(),
    "no recycling": RecyclingChain(window=None),
    "never unsure": RecyclingChain(theta=0.0, max_length=6),
    "always unsure": RecyclingChain(theta=1.0),
    "wide": RecyclingChain(theta=0.2, window=5, max_length=9),
    "two passes": TwoPassTree(),
    "two passes, nothing copied": TwoPassTree(window=None, theta=0.7),
    "many branches": TwoPassTree(max_length=8, theta=0.9, branches=8, nodes=24, window=3),
    "no branches": TwoPassTree(branches=0),
}


@cache
def pair(family: str) -> tuple[Any, Any]:
    return toys.model(family, layers=2), noisy(family, 0.1, layers=2)


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
@pytest.mark.parametrize("family", ["whisper", pytest.param("llama", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", limited(SHAPES, 5))
def test_whatever_is_recycled_the_tokens_are_the_targets(
    name: str, family: str, batch: int
) -> None:
    model, drafter = pair(family)
    recipe = "specasr" if isinstance(SHAPES[name], RecyclingChain) else "specasr-tree"
    fast = mmspec.accelerate(model, recipe, drafter=drafter, tree=SHAPES[name])
    request = toys.inputs(family, batch=batch)
    out = fast.generate(**request, **GREEDY)
    assert torch.equal(out.sequences, output_of(family, batch))
    assert out.stats.fallback is None
    drawn, plain = fast.generate(**request, **SAMPLED), plain_of(family, batch)
    assert torch.equal(drawn.sequences, plain)
    assert drawn.stats.fallback is None
    assert out.stats.num_accepted_draft_tokens > 0


@cache
def output_of(family: str, batch: int) -> Tensor:
    sequences: Tensor = pair(family)[0].generate(**toys.inputs(family, batch=batch), **GREEDY)
    return sequences


@cache
def plain_of(family: str, batch: int) -> Tensor:
    request = toys.inputs(family, batch=batch)
    sequences: Tensor = mmspec.decode_plain(pair(family)[0], **request, **SAMPLED).sequences
    return sequences


def test_never_unsure_without_recycling_is_a_chain() -> None:
    model, drafter = pair("whisper")
    request = toys.inputs("whisper", batch=3)
    shapes: list[Any] = [RecyclingChain(max_length=5, theta=0.0, window=None), Chain(Fixed(5))]
    stats = [
        mmspec.accelerate(model, "specasr", drafter=drafter, tree=shape)
        .generate(**request, **GREEDY)
        .stats
        for shape in shapes
    ]
    assert stats[0].per_step_accepted == stats[1].per_step_accepted
    assert stats[0].per_step_drafted == stats[1].per_step_drafted


def test_a_perfect_draft_model_needs_as_few_calls_as_can_be() -> None:
    model, request = toys.model("whisper", layers=2), toys.inputs("whisper")
    drafts = -(-ROOM // 6)
    chain = mmspec.accelerate(model, "specasr", drafter=model, tree=RecyclingChain(5, 0.0))
    tree = mmspec.accelerate(model, "specasr-tree", drafter=model, tree=TwoPassTree(5, 0.0))
    chain.generate(**request, **GREEDY)  # asks the class whether it reads a prompt with a draft
    assert chain.generate(**request, **GREEDY).stats.target_calls == drafts - 1  # one is, unasked
    assert tree.generate(**request, **GREEDY).stats.target_calls == drafts


class Scripted(DraftModel):
    """Follows a script, whatever tokens come between, as a model of the same audio would."""

    def __init__(self, script: Sequence[int], vocabulary: int, doubts: Sequence[int] = ()) -> None:
        self.script, self.vocabulary, self.doubts = list(script), vocabulary, set(doubts)
        self.forwards = 0

    @property
    def sees(self) -> str:
        return "nothing"

    def predict_first(self, context: Context, state: Any) -> Categorical:
        return self._distribution([context.history[0]])

    def predict(self, context: Context, state: Any, nodes: DraftNodes) -> Categorical:
        read_nodes = torch.cat((*nodes.earlier, nodes.tokens), 1)[0]
        paths = [read_nodes[seen].tolist() for seen in nodes.layout.visible[0]]
        return self._distribution([[*context.history[0], *path] for path in paths])

    def _distribution(self, texts: list[list[int]]) -> Categorical:
        """Sure of the next word of the script; in doubt behind `doubts`."""
        self.forwards += 1
        scores = torch.zeros(1, len(texts), self.vocabulary)
        for at, text in enumerate(texts):
            known = [self.script.index(token) for token in text if token in self.script]
            token = self.script[known[-1] + 1] if known[-1] + 1 < len(self.script) else END
            sure = text[-1] not in self.doubts
            scores[0, at, token] = 9.0 if sure else 1.0
            scores[0, at, token + 40] = 0.0 if sure else 0.9
        return Categorical(scores, hard=True)


END = 40
TEXT = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]  # what the draft model would say


def rounds(target: list[int], shape: Any, doubts: Sequence[int] = ()) -> tuple[int, int]:
    """Rounds and forwards of the draft model until a target has generated `target`."""
    script = Scripted(TEXT, 100, doubts)
    shape = replace(shape, ends=frozenset({END}))
    return _ScriptedTarget(target).run(Autoregressive(script, shape, Kind.DET)), script.forwards


class _ScriptedTarget:
    """A target that greedily generates one text, independent of drafts: only the rounds are
    counted.
    """

    def __init__(self, text: Sequence[int]) -> None:
        self.text = list(text)

    def run(self, drafter: Autoregressive) -> int:
        emitted, calls = [self.text[0]], 0
        state = drafter.begin(self.context(emitted))
        while len(emitted) < len(self.text):
            draft = drafter.propose(self.context(emitted), state)
            path, rest = list[int](), self.text[len(emitted) :]
            rows = (draft.parents[0].tolist(), draft.tokens[0].tolist(), draft.mask[0])
            children = {
                (parent, token): node
                for node, (parent, token, there) in enumerate(zip(*rows, strict=True))
                if there
            }
            for token in rest:
                node = children.get((path[-1] if path else -1, token))
                if node is None:
                    break
                path.append(node)
            emitted = [*emitted, *rest[: len(path) + 1]]
            news: Any = SimpleNamespace(round=SimpleNamespace(accepted=[len(path)], path=[path]))
            state.shape = drafter.shape.observe(state.shape, news)
            calls += 1
        return calls

    def context(self, emitted: list[int]) -> Any:
        return SimpleNamespace(
            batch=1,
            history=[emitted],
            finished=(False,),
            device=torch.device("cpu"),
            noise=None,
            request=SimpleNamespace(row_limits=None),
            num_left=lambda row: 100 - len(emitted),
            position=lambda: torch.tensor([[len(emitted)]]),
            sampling=SimpleNamespace(needs_prefix=False),
        )


def test_one_token_put_in_needs_two_rounds_with_recycling() -> None:
    inserted = [*TEXT[:5], 50, *TEXT[5:]]
    shape = RecyclingChain(max_length=24, theta=0.4)
    calls, forwards = rounds(inserted, shape)
    assert calls == 2
    alone, more = rounds(inserted, replace(shape, window=None))
    assert alone == 2
    assert forwards < more  # the rest was read at once, not drafted again


@pytest.mark.parametrize(
    "target",
    [[*TEXT[:5], 50, *TEXT[6:]], [*TEXT[:5], *TEXT[6:]]],
    ids=["another token", "one left out"],
)
def test_one_token_changed_is_in_step_again(target: list[int]) -> None:
    with_tail, without = (
        rounds(target, RecyclingChain(window=window, theta=0.4)) for window in (2, None)
    )
    assert with_tail[0] <= without[0]
    assert with_tail[1] <= without[1]


def test_the_second_best_token_of_an_unsure_place_saves_a_round() -> None:
    behind = TEXT[4]
    target = [*TEXT[:5], TEXT[5] + 40, *TEXT[5:]]
    chain, _ = rounds(target, RecyclingChain(theta=0.0), doubts=[behind])
    tree, _ = rounds(target, TwoPassTree(theta=0.4), doubts=[behind])
    assert (chain, tree) == (2, 1)


def test_where_texts_are_aligned() -> None:
    text = [5, 6, 7, 8, 6]
    assert [find_aligned(6, text, at, 1) for at in range(6)] == [1, 1, 1, 4, 4, 4]
    assert find_aligned(9, text, 2, 9) is None
    assert find_aligned(6, text, 1, None) is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RecyclingChain(max_length=0), "max_length=0"),
        (lambda: RecyclingChain(theta=1.5), "theta=1.5"),
        (lambda: RecyclingChain(window=-1), "window=-1"),
        (lambda: TwoPassTree(nodes=3), "nodes=3"),
    ],
)
def test_shapes_that_are_none(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_the_recipes_differ_in_their_shape_alone() -> None:
    one, two = recipes.get("specasr"), recipes.get("specasr-tree")
    assert replace(one, execution=two.execution, name="", reconstructed="") == replace(
        two, name="", reconstructed=""
    )
