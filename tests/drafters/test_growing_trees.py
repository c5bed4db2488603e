"""Trees that search, that follow an entropy, and that learn what pays."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

import mmspec
from mmspec.distributions.categorical import Categorical
from mmspec.draft import Draft, Kind, Round, Scores, Verdict
from mmspec.drafters.growth import Chain, News, Shape
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.lengths.linear_timings import LinearTimings
from mmspec.drafters.neural.shared import SharedBackbone
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.drafters.shapes import shape_of
from mmspec.drafters.trees.auto_tree import AutoTree, TreeHabits
from mmspec.drafters.trees.best_first import BestFirstTree
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.drafters.trees.entropy_tree import EntropyTree, tapered
from mmspec.targets.tokens.context import Context
from mmspec.trees import Tree
from tests import toys
from tests.covering import covering
from tests.drafters.driving import drive, greedy, inputs, tiny
from tests.toys.readers import backbone

SHAPES: dict[str, Shape] = {
    "step": BestFirstTree(nodes=9, depth=4, step=0.5, branch=3),
    "dijkstra": BestFirstTree(nodes=6, depth=4, step=0.0, branch=2),
    "confident": BestFirstTree(nodes=12, depth=3, step=math.inf, branch=4, threshold=0.3),
    "entropy": EntropyTree(depth=(1, 4), width=(1, 3), nodes=8, sure=0.1, unsure=0.9),
    "auto": AutoTree(nodes=8, depth=4),
}


class ShapeWatcher(Autoregressive):
    """Keeps its drafts, and the text that they were made for."""

    drafts: ClassVar[list[tuple[Draft, list[list[int]]]]] = []

    def propose(self, context: Context, state: Any) -> Draft:
        draft = super().propose(context, state)
        self.drafts.append((draft, [[*text] for text in context.history]))
        return draft


def watched(shape: Shape, depth: int = 2, rows: int = 1, room: int = 8) -> list[Any]:
    ShapeWatcher.drafts.clear()
    model = tiny()
    whole = SharedBackbone(backbone(model), depth=depth)
    prompt = inputs((0, 3, 5)[:rows])
    text, _ = drive(model, ShapeWatcher(whole, shape, Kind.DET), prompt, room)
    assert text == greedy(model, prompt, room)
    return list(ShapeWatcher.drafts)


def paths(draft: Draft, row: int = 0) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    pairs = zip(draft.tokens[row].tolist(), draft.parents[row].tolist(), strict=True)
    for token, parent in pairs:
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return [path for path, real in zip(found, draft.mask[row].tolist(), strict=True) if real]


@pytest.mark.parametrize(("name", "rows"), covering(tuple(SHAPES), (3, 1), strength=1))
def test_output_is_the_targets(name: str, rows: int) -> None:
    """Greedy, with a drafter that reads one layer of two, padded rows among them."""
    assert watched(SHAPES[name], depth=1, rows=rows, room=24)


@pytest.mark.parametrize(
    ("name", "family"), covering(tuple(SHAPES), ("llava", "qwen2_5_vl"), strength=1)
)
def test_a_seed_gives_what_plain_decoding_gives(family: str, name: str) -> None:
    model = toys.model(family)
    given = toys.inputs(family, batch=3, ragged=True)
    how = {"max_new_tokens": 10, "do_sample": True, "seed": 5}
    plain = mmspec.accelerate(model, "plain").generate(**given, **how)
    fast = mmspec.accelerate(model, "coupled", drafter=model, tree=SHAPES[name])
    out = fast.generate(**given, **how)
    assert out.stats.fallback is None
    assert torch.equal(plain.sequences, out.sequences)


# --- the search -----------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0.0, 0.7, math.inf])
def test_the_search_finds_the_nearest_nodes_however_it_steps(step: float) -> None:
    """The seven likeliest paths of at most three tokens, each node with its four best children."""
    shape = BestFirstTree(nodes=7, depth=3, step=step, branch=4)
    for draft, texts in watched(shape, room=20)[:3]:
        if draft.nodes == 7:
            assert set(paths(draft)) == by_hand(texts[0], 7, 3, 4)


@torch.no_grad()
def by_hand(text: list[int], nodes: int, depth: int, branch: int) -> set[tuple[int, ...]]:
    model, scored, front = tiny(), dict[tuple[int, ...], float](), [((), 0.0)]
    for _ in range(depth):
        grown: list[Any] = []
        for path, score in front:
            distribution = (
                model(input_ids=torch.tensor([[*text, *path]])).logits[0, -1].log_softmax(-1)
            )
            values, tokens = (part.tolist() for part in distribution.topk(branch))
            pairs = zip(values, tokens, strict=True)
            grown += [((*path, token), score + value) for value, token in pairs]
        scored |= dict(grown)
        front = grown
    return {*sorted(scored, key=scored.__getitem__, reverse=True)[:nodes]}


def test_every_row_finds_its_own() -> None:
    """Rows of a batch draft what they draft alone."""
    shape = BestFirstTree(nodes=6, depth=3, step=0.5, branch=3)
    draft, texts = watched(shape, rows=3)[0]
    for row, text in enumerate(texts):
        assert set(paths(draft, row)) == by_hand(text, 6, 3, 3)


def test_it_keeps_as_much_as_a_beam_can() -> None:
    """Of equally many nodes: their chances sum to at least those of EAGLE-2's beam."""
    model = tiny()
    best = watched(BestFirstTree(nodes=8, depth=3, step=0.5, branch=3))[0]
    beam = watched(DynamicTree(depth=3, beam=3, nodes=8))[0]
    assert best[1] == beam[1]
    assert mass(model, best[1][0], best[0]) >= mass(model, beam[1][0], beam[0]) - 1e-6


@torch.no_grad()
def mass(model: Any, text: list[int], draft: Draft) -> float:
    total = 0.0
    for path in paths(draft):
        distribution = model(input_ids=torch.tensor([[*text, *path]])).logits[0].log_softmax(-1)
        total += math.exp(
            sum(float(distribution[len(text) - 1 + at, one]) for at, one in enumerate(path))
        )
    return total


def test_a_threshold_above_one_leaves_a_chain() -> None:
    for draft, _ in watched(BestFirstTree(nodes=9, depth=3, step=0.0, threshold=1.1)):
        assert draft.parents[0].tolist() == list(range(-1, draft.nodes - 1))


def test_unlikely_siblings_are_not_drafted() -> None:
    model = tiny()
    draft, texts = watched(BestFirstTree(nodes=40, depth=2, step=math.inf, threshold=0.5))[0]
    for path in paths(draft):
        with torch.no_grad():
            ids = torch.tensor([[*texts[0], *path[:-1]]])
            distribution = model(input_ids=ids).logits[0, -1].softmax(-1)
        assert distribution[path[-1]] >= 0.5 * distribution.max() - 1e-6


@pytest.mark.parametrize(
    "sizes", [{"nodes": 0}, {"depth": 0}, {"branch": 0}, {"step": -1.0}, {"threshold": math.nan}]
)
def test_sizes_that_are_none_are_refused(sizes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"at least 1|below 0"):
        BestFirstTree(**sizes)


# --- entropy --------------------------------------------------------------------------------------


def test_sure_is_deep_and_unsure_is_wide() -> None:
    shape = EntropyTree(depth=(2, 6), width=(1, 5), nodes=30, sure=0.1, unsure=0.5)
    assert shape.tree(0.0) == Tree.chain(6)
    wide = shape.tree(1.0)
    assert (wide.depth, len(wide.kids[0])) == (2, 5)
    depths = [shape.tree(entropy / 20).depth for entropy in range(20)]
    assert depths == sorted(depths, reverse=True)


def test_a_tree_tapers_within_its_nodes() -> None:
    assert tapered(4, 2, 32) == Tree.of_ranks([[0], [1], [0, 0], [1, 0], [0] * 3, [0] * 4])
    assert tapered(4, 8, 6).nodes <= 6
    assert tapered(4, 1, 4) == Tree.chain(4)


def test_constant_ends_are_a_fixed_tree() -> None:
    fixed = watched(EntropyTree(depth=(3, 3), width=(2, 2), nodes=8), room=12)
    assert {draft.tree for draft, texts in fixed if len(texts[0]) < 18} == {tapered(3, 2, 8)}


@torch.no_grad()
def test_the_tree_follows_the_last_distribution_of_the_target() -> None:
    """Whatever the drafter makes of it, and under greedy decoding, too."""
    shape, model = EntropyTree(depth=(1, 6), width=(1, 4), nodes=16, sure=0.0, unsure=1.0), tiny()
    for draft, texts in watched(shape, depth=1, room=30)[1:6]:
        distribution = model(input_ids=torch.tensor([texts[0][:-1]])).logits[0, -1].log_softmax(-1)
        entropy = float(-(distribution.exp() * distribution).sum()) / math.log(len(distribution))
        assert draft.tree == shape.tree(entropy)


@pytest.mark.parametrize(
    "ends", [{"depth": (3, 2)}, {"width": (0, 2)}, {"nodes": 3}, {"sure": 0.5, "unsure": 0.4}]
)
def test_ends_the_wrong_way_round_are_refused(ends: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"give"):
        EntropyTree(**ends)


# --- what pays ------------------------------------------------------------------------------------


def habits(rates: tuple[float, ...], level: float, node: float, fixed: float = 1.0) -> TreeHabits:
    """What is known of a machine after many rounds."""
    known = TreeHabits([1e6 * rate for rate in rates], looks=1e6)
    for size in (1, 3, 6, 12, 24):
        known.verify.add(size, fixed + node * size)
    for size in (1, 3, 6):
        known.draft.add(size, level * size)
    return known


def test_where_nodes_are_free_the_tree_is_wide_and_where_they_cost_it_is_a_chain() -> None:
    auto, rates = AutoTree(nodes=24, depth=6), (0.5, 0.2, 0.1, 0.05)
    assert len(auto.choose(habits(rates, level=0.1, node=0.0)).kids[0]) == 4
    assert auto.choose(habits(rates, level=0.02, node=0.3)).is_chain
    assert auto.choose(habits((0.05, 0.02, 0.01, 0.0), level=0.5, node=0.5)).nodes == 1


def test_no_chain_would_be_faster() -> None:
    """By what it was told, for machines between the ends."""
    rates = (0.6, 0.15, 0.05, 0.02)
    for level in (0.01, 0.1, 0.3):
        for node in (0.0, 0.03, 0.1, 0.4):
            auto, known = AutoTree(nodes=24, depth=8), habits(rates, level, node)
            chosen = auto.choose(known)
            speed = tokens_of(chosen, known.rates()) / seconds_of(chosen, known)
            for length in range(1, 9):
                chain = Tree.chain(length)
                assert speed >= tokens_of(chain, known.rates()) / seconds_of(chain, known) - 1e-9


def tokens_of(tree: Tree, rates: tuple[float, ...]) -> float:
    chance: list[float] = []
    for node, parent in enumerate(tree.parents):
        rank = tree.kids[parent + 1].index(node)
        chance.append((1.0 if parent < 0 else chance[parent]) * rates[rank])
    return 1 + sum(chance)


def seconds_of(tree: Tree, known: TreeHabits) -> float:
    (_, level), (fixed, node) = known.draft.line(), known.verify.line()
    return level * tree.depth + fixed + node * tree.nodes


def test_ranks_are_counted_where_the_drafter_had_spoken() -> None:
    """A drafter that is the target itself is always right with its best token."""
    auto = AutoTree(nodes=6, depth=3)
    watched(auto, depth=2, room=30)
    assert auto.learned.looks > 5
    assert auto.learned.ranks[0] == pytest.approx(auto.learned.looks)
    other = AutoTree(nodes=6, depth=3)
    watched(other, depth=1, room=30)
    assert 0 < other.learned.ranks[0] < other.learned.looks
    assert sum(other.learned.ranks) <= other.learned.looks + 1e-9


def test_an_answer_that_ends_early_says_what_longer_drafts_are_worth() -> None:
    """Rows of greedy chains of four: broken off, kept whole, ended on a drafted token, over."""
    scores = torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0]).expand(4, 1, 5)
    distributions = [Categorical(scores, hard=True)] * 4
    draft = Draft.chain(torch.zeros(4, 4, dtype=torch.int64), Kind.DET)
    said = ((0, 0, 2), (0, 0, 0, 0, 4), (0, 0), ())
    path = ((0, 1), (0, 1, 2, 3), (0, 1), ())
    verdict = Verdict(torch.zeros(4, 4), torch.tensor([2, 4, 2, 0]), torch.zeros(4))
    kept = Round(
        *(3, (4, 4, 4, 0), (2, 4, 2, 0), path, (True, True, False, False), said),
        (False, False, True, True),
        verdict,
        depth=4,
    )
    news = News(
        draft, Scores(distributions[0], torch.zeros(4, 1)), kept, ((),) * 4, 3, distributions
    )
    auto = AutoTree(width=3)
    known = auto.observe(auto.begin(), news)
    assert [looks for _, looks in known.levels] == pytest.approx([3, 3, 3, 1], rel=0.1)
    assert [right for right, _ in known.levels] == pytest.approx([3, 3, 1, 1], rel=0.1)
    assert known.ranks[2] > 0.8  # the third was right where the first row broke off
    assert sum(known.ranks) < known.looks - 0.5  # and nothing behind the end


def test_costs_follow_what_was_timed_lately() -> None:
    """A slow beginning is forgotten, and a line leads from sizes that were timed to others."""
    times = LinearTimings()
    for size in (1, 3, 6):
        times.add(size, 10.0)
    for _ in range(200):
        times.add(8, 2.0)
        times.add(4, 1.6)
    fixed, each = times.line()
    assert [fixed, each] == pytest.approx([1.2, 0.1])
    assert times.largest == 8
    falling = LinearTimings(rounds=[(1, 2.0), (5, 1.0)])
    assert falling.line()[1] == 0.0  # no node pays for itself
    assert LinearTimings(True, [(2, 1.0), (4, 2.0), (4, 9.0)]).line() == (0.0, 0.5)


def test_what_was_learned_outlives_a_request_and_a_batch_of_another_size_is_timed_anew() -> None:
    auto = AutoTree(nodes=6, depth=3)
    watched(auto, room=20)
    rounds = auto.learned.rounds
    watched(auto, room=20)
    assert auto.learned.rounds > rounds
    timed = len(auto.learned.verify)
    watched(auto, rows=3, room=3)
    assert len(auto.learned.verify) < timed


def test_shapes_are_known_by_name() -> None:
    assert isinstance(shape_of(None, "auto", None), AutoTree)
    assert shape_of(None, "best-first", None) == BestFirstTree()
    assert shape_of(None, "entropy", None) == EntropyTree()
    assert shape_of(None, "dynamic", None) == DynamicTree()
    with pytest.raises(ValueError, match="'best-first', 'entropy', 'parallel'"):
        shape_of(None, "bushy", None)


@pytest.mark.parametrize("sizes", [{"nodes": 0}, {"depth": 0}, {"width": 0}, {"width": 9}])
def test_an_automatic_tree_has_sizes(sizes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="within"):
        AutoTree(**sizes)


def test_the_longest_path_is_known_before() -> None:
    longest = {name: shape.longest for name, shape in SHAPES.items()}
    assert longest == {"step": 4, "dijkstra": 4, "confident": 3, "entropy": 4, "auto": 4}
    assert Chain(Fixed(4)).longest == 4
    assert replace(BestFirstTree(), depth=2).longest == 2
