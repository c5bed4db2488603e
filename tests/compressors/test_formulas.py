"""Every compressor against a direct computation, and at settings equal to another one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from mmspec.compressors import parse_compressor
from mmspec.compressors.attn_topk import AttentionTopK
from mmspec.compressors.average_pool import AveragePool
from mmspec.compressors.average_pool_1d import AveragePool1d
from mmspec.compressors.bipartite_merge import BipartiteMerge
from mmspec.compressors.contract import Compressor, Features
from mmspec.compressors.farthest_point import FarthestPoint
from mmspec.compressors.holistic import Holistic
from mmspec.compressors.similarity_prune import SimilarityPrune
from mmspec.compressors.temporal_redundancy import TemporalRedundancy
from mmspec.compressors.text_similarity import TextSimilarity
from mmspec.compressors.top_p_uniform import TopPUniform, even_indices
from mmspec.compressors.uv_prune import UvPrune
from tests.compressors.catalogue import random_features, signals

torch.set_num_threads(1)


def kept_indices(compressor: Compressor, features: Features, told: dict[str, Tensor]) -> list[int]:
    """Kept indices of an image whose slots are 0, 1, 2, ..."""
    plain = Features(features.values, torch.arange(len(features.values)), features.grid)
    return compressor.compress(plain, told).positions.tolist()


def cosine(one: Tensor, other: Tensor) -> float:
    return float(functional.cosine_similarity(one, other, dim=0))


def test_pooling_means_over_cells_of_the_grid() -> None:
    values = torch.arange(24.0)[:, None]
    thin = AveragePool(2).compress(Features(values, torch.arange(24), (4, 6)), {})
    assert thin.features[:, 0].tolist() == [3.5, 5.5, 7.5, 15.5, 17.5, 19.5]
    assert thin.positions.tolist() == [0, 2, 4, 12, 14, 16]  # the upper left of each centre
    assert len(AveragePool(2).compress(random_features((24, 24)), {}).features) == 144  # IbED


def test_pooling_a_video_pools_its_frames() -> None:
    film = random_features((3, 4, 6))
    thin = AveragePool(2).compress(film, {})
    for frame, own in enumerate(thin.features.chunk(3)):
        lines = slice(24 * frame, 24 * (frame + 1))
        still = Features(film.values[lines], film.positions[lines], (4, 6))
        alone = AveragePool(2).compress(still, {})
        assert_close(own, alone.features, rtol=0, atol=0)
        assert torch.equal(thin.positions.chunk(3)[frame], alone.positions)


def test_pooling_without_a_grid_means_over_runs() -> None:
    thin = AveragePool(2).compress(Features(torch.arange(6.0)[:, None], torch.arange(6)), {})
    assert thin.features[:, 0].tolist() == [1.5, 4.5]
    assert thin.sizes.tolist() == [4, 2]


def test_runs_are_those_of_adaptive_pooling() -> None:
    features = random_features(None)
    for keep in (0.1, 0.25, 0.4, 0.9):
        thin = AveragePool1d(keep).compress(features, {})
        expected = functional.adaptive_avg_pool1d(features.values.T[None], len(thin.features))
        assert_close(thin.features, expected[0].T)
        assert thin.positions[-1] == features.positions[-1]


def test_attention_keeps_the_highest_in_order() -> None:
    told = signals(21)
    for name, signal in (
        ("attn-topk", "attention"),
        ("dream-topk", "last-layer-attention"),
        ("cls-topk", "cls"),
    ):
        best = sorted(told[signal].topk(6).indices.tolist())
        assert (
            kept_indices(
                parse_compressor(f"{name}:keep=0.3"), random_features(None), {signal: told[signal]}
            )
            == best
        )


def test_text_similarity_is_the_nearest_word() -> None:
    features, told = random_features(None), signals(21)
    scores = [max(cosine(seen, word) for word in told["text"]) for seen in features.values]
    best = sorted(sorted(range(21), key=lambda at: -scores[at])[:6])
    assert kept_indices(TextSimilarity(0.3), features, told) == best


def test_similarity_prunes_what_is_like_something_kept() -> None:
    features, told = random_features(None, width=3), signals(21)
    expected: list[int] = []
    for at in told["attention"].argsort(descending=True).tolist():
        near = [cosine(features.values[at], features.values[one]) for one in expected]
        if len(expected) < 10 and max(near, default=-1) <= 0.6:
            expected.append(at)
    assert len(expected) > 2
    assert kept_indices(SimilarityPrune(10 / 21, 0.6), features, told) == sorted(expected)
    top = kept_indices(AttentionTopK(0.4), features, told)
    assert kept_indices(SimilarityPrune(0.4, 1), features, told) == top
    first = int(told["attention"].argmax())
    assert kept_indices(SimilarityPrune(0.4, -1), features, told) == [first]


def test_farthest_points_maximise_the_least_distance() -> None:
    features = random_features(None, width=3)
    direction = functional.normalize(features.values, dim=-1)
    expected = [int((direction @ direction.mean(0)).argmin())]
    while len(expected) < 6:
        nearest = [
            -1 if at in expected else min(1 - cosine(one, direction[other]) for other in expected)
            for at, one in enumerate(direction)
        ]
        expected.append(max(range(21), key=lambda at: nearest[at]))
    assert kept_indices(FarthestPoint(6 / 21), features, {}) == sorted(expected)


def test_merging_joins_what_is_alike() -> None:
    values = torch.tensor([[1.0, 0], [0, 1], [1, 0.01], [0.02, 1], [-1, -1], [5, -5]])
    thin = BipartiteMerge(5 / 6).compress(Features(values, torch.arange(6)), {})
    assert sorted(thin.sizes.tolist()) == [1, 1, 1, 1, 2]
    assert len(BipartiteMerge(0.25).compress(random_features((24, 24)), {}).features) == 144


def test_one_round_of_merging_is_that_of_the_paper() -> None:
    """Even tokens choose the nearest odd one; the best r links are merged into means."""
    features = random_features(None)
    values, count = features.values, 21
    links = sorted(
        (
            (max((cosine(values[a], values[b]), b) for b in range(1, count, 2)), a)
            for a in range(0, count, 2)
        ),
        reverse=True,
    )[:6]
    groups = {at: [at] for at in range(count)}
    for (_, into), one in links:
        groups[into] += groups.pop(one)
    order = sorted(groups.values(), key=lambda group: sum(group) / len(group))
    thin = BipartiteMerge(15 / 21).compress(features, {})
    assert_close(thin.features, torch.stack([values[group].mean(0) for group in order]))
    assert thin.sizes.tolist() == [len(group) for group in order]


def test_top_p_and_uniform_follow_the_release() -> None:
    features, scores = random_features(None), torch.rand(21) ** 3
    told = {"question-attention": scores}
    order = scores.argsort(descending=True)
    head: list[int] = []
    mass, held = 0.4 * float(scores.sum()), 0.0
    while held < mass:
        head.append(int(order[len(head)]))
        held += float(scores[head[-1]])
    assert 0 < len(head) < 9
    rest = [at for at in range(21) if at not in head]
    spread = torch.linspace(0, len(rest) - 1, 9 - len(head)).floor().long()
    expected = sorted(head + [rest[at] for at in spread])
    assert kept_indices(TopPUniform(9 / 21, 0.4), features, told) == expected
    best = sorted(order[:9].tolist())
    assert kept_indices(TopPUniform(9 / 21, 1.0), features, told) == best
    assert kept_indices(TopPUniform(9 / 21, 0.0), features, told) == even_indices(21, 9).tolist()
    flat = {"question-attention": torch.full((20,), 0.05)}
    twenty = Features(features.values[:20], torch.arange(20))
    assert kept_indices(TopPUniform(0.5, 0.4), twenty, flat)[:8] == list(range(8))  # ceil(0.4 * 20)


def test_three_scores_are_fused_within_each_frame() -> None:
    film, told = random_features((3, 3, 4)), signals(36)
    values = film.values.view(3, 3, 4, -1)
    scores = torch.zeros(3, 3, 3, 4)  # score, frame, row, column
    scores[0] = told["question-attention"].view(3, 3, 4)
    for frame in range(3):
        before = frame - 1 if frame else 1
        for row in range(3):
            for column in range(4):
                here = values[frame, row, column]
                scores[1, frame, row, column] = 1 - cosine(here, values[before, row, column])
                near = [
                    cosine(here, values[frame, r, c])
                    for r in range(max(row - 1, 0), min(row + 2, 3))
                    for c in range(max(column - 1, 0), min(column + 2, 4))
                ]
                scores[2, frame, row, column] = torch.tensor(near).var(correction=0)
    low, high = scores.amin((2, 3), keepdim=True), scores.amax((2, 3), keepdim=True)
    fused = ((scores - low) / (high - low)).mean(0).flatten()
    best = sorted(fused.topk(10).indices.tolist())
    assert kept_indices(Holistic(0.3), film, told) == best
    only = kept_indices(Holistic(1 / 12, 1.0, 0.0, 0.0), film, told)
    assert only == sorted(
        int(frame.argmax()) + 12 * at for at, frame in enumerate(scores[0].flatten(1))
    )


def test_the_gain_in_cosine_telescopes() -> None:
    told = signals(21)
    layers = torch.randn(5, 21, 6)  # states behind layers 0 to 4
    asked = torch.randn(5, 3, 6)

    def cosines(layer: int) -> Tensor:  # (n, T)
        return functional.cosine_similarity(layers[layer, :, None], asked[layer, None], dim=-1)

    gained = sum(cosines(at) - cosines(at - 1) for at in range(1, 5)).sum(1)  # type: ignore[union-attr]
    best = sorted(gained.topk(6).indices.tolist())
    told = {"states": layers[[0, 4]], "question-states": asked[[0, 4]]}
    assert kept_indices(UvPrune(0.3), random_features(None), told) == best
    scaled = {"states": 3 * told["states"], "question-states": told["question-states"]}
    assert kept_indices(UvPrune(0.3), random_features(None), scaled) == best


def test_what_has_not_changed_is_dropped() -> None:
    film = random_features((4, 2, 3))
    values = film.values.clone().view(4, 6, -1)
    values[1] = values[0]
    values[2, :3], values[3, 3:] = 2 * values[0, :3], values[2, 3:]
    still = Features(values.flatten(0, 1), film.positions, film.grid)
    assert kept_indices(TemporalRedundancy(0.999), still, {}) == [*range(6), 15, 16, 17, 18, 19, 20]


def test_slow_change_is_noticed() -> None:
    """Each frame turns by 10 degrees; against what was kept it passes 25 in the third step."""
    angle = torch.deg2rad(10.0 * torch.arange(7.0))
    film = Features(torch.stack((angle.cos(), angle.sin()), 1), torch.arange(7), (7, 1, 1))
    limit = float(torch.deg2rad(torch.tensor(25.0)).cos())
    assert kept_indices(TemporalRedundancy(limit), film, {}) == [0, 3, 6]


def test_a_token_at_the_limit_is_kept() -> None:
    film = Features(torch.eye(2), torch.arange(2), (2, 1, 1))  # a cosine of 0
    assert kept_indices(TemporalRedundancy(0), film, {}) == [0, 1]
    assert kept_indices(TemporalRedundancy(-0.1), film, {}) == [0]
    same = random_features((1, 4, 5)).values.repeat(3, 1)  # cosines of 1, some of them rounded up
    still = Features(same, torch.arange(60), (3, 4, 5))
    assert kept_indices(TemporalRedundancy(1), still, {}) == list(range(60))
    assert kept_indices(TemporalRedundancy(-1), still, {}) == list(range(20))
