"""Neighbour tables: nearest codes, token ids around them, and files bound to their codebook."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mmspec.codes.codebook import Codebook, Metric, Neighbours, resolve_neighbours

CPU = torch.device("cpu")
METRICS: tuple[Metric, ...] = ("raw", "normalised")


def vectors(size: int = 40, width: int = 6, seed: int = 0) -> Tensor:
    return torch.randn(size, width, generator=torch.Generator().manual_seed(seed))


def by_hand(book: Codebook, k: int) -> list[list[int]]:
    """Neighbours one pair at a time, out of plain arithmetic."""
    rows = [row.double() for row in book.vectors]
    if book.metric == "normalised":
        rows = [row / row.norm() for row in rows]
    near = []
    for i, one in enumerate(rows):
        others = [(float((one - other).norm()), j) for j, other in enumerate(rows) if j != i]
        near.append([j for _, j in sorted(others)[:k]])
    return near


@pytest.mark.parametrize("metric", METRICS)
def test_neighbours_are_the_nearest_codes_in_order(metric: Metric) -> None:
    book = Codebook.from_offset(vectors(), metric=metric)
    for k in (1, 7, 39):
        table = book.neighbours(k)
        assert table.near.tolist() == by_hand(book, k)
        assert not (table.near == torch.arange(40)[:, None]).any()  # none is its own neighbour


def test_the_metrics_differ() -> None:
    raw, normalised = (
        Codebook.from_offset(vectors(), metric=metric).neighbours(5) for metric in METRICS
    )
    assert not torch.equal(raw.near, normalised.near)


@pytest.mark.parametrize("metric", METRICS)
def test_chunks_change_nothing(metric: Metric) -> None:
    book = Codebook.from_offset(vectors(101), metric=metric)
    whole = book.neighbours(20, chunk=101).near
    for chunk in (1, 7, 100):
        assert torch.equal(book.neighbours(20, chunk).near, whole)


@pytest.mark.parametrize("metric", METRICS)
def test_distances_are_symmetric(metric: Metric) -> None:
    book = Codebook.from_offset(vectors(), offset=3, vocabulary=50, metric=metric)
    every = torch.arange(40)
    distances = book.distances(every)
    assert torch.equal(distances, distances.T)
    assert not distances.diagonal().any()
    squared = book.squared_distance(every[:, None] + 3, every + 3)
    torch.testing.assert_close(squared, distances.square(), atol=1e-12, rtol=1e-12)


def test_ties_go_to_the_lower_code_and_duplicates_are_neighbours() -> None:
    book = Codebook.from_offset(torch.tensor([[0.0], [1.0], [-1.0], [0.0], [2.0]]))
    assert book.neighbours(4).near.tolist() == [
        [3, 1, 2, 4],
        [0, 3, 4, 2],
        [0, 3, 1, 4],
        [0, 1, 2, 4],
        [1, 0, 3, 2],
    ]


def test_an_offset_goes_there_and_back() -> None:
    plain = Codebook.from_offset(vectors()).neighbours(9)
    moved = Codebook.from_offset(vectors(), offset=4, vocabulary=60).neighbours(9)
    tokens, real = moved.lookup(torch.arange(60), 9)
    assert real[:, 0].tolist() == [4 <= token < 44 for token in range(60)]
    assert torch.equal(tokens[4:44] - 4, plain.lookup(torch.arange(40), 9)[0])
    assert tokens.min() >= 4
    assert tokens.max() < 44


def test_ids_may_be_any_map() -> None:
    ids = torch.randperm(70, generator=torch.Generator().manual_seed(1))[:40]
    book = Codebook(vectors(), ids, vocabulary=70)
    assert torch.equal(book.codes[ids], torch.arange(40))
    assert int((book.codes < 0).sum()) == 30
    plain = Codebook.from_offset(vectors()).neighbours(5)
    tokens, real = book.neighbours(5).lookup(ids, 5)
    assert real.all()
    assert torch.equal(tokens, ids[plain.near.long()])
    foreign = (book.codes < 0).nonzero()[0, 0]
    assert torch.isinf(book.squared_distance(foreign, ids)).all()


def test_fewer_neighbours_are_the_first_of_many() -> None:
    table = Codebook.from_offset(vectors()).neighbours(9)
    x = torch.tensor([[3, 8], [0, 39]])
    assert table.lookup(x, 4)[0].shape == (2, 2, 4)
    assert torch.equal(table.lookup(x, 4)[0], table.lookup(x, 9)[0][..., :4])


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    book = Codebook.from_offset(vectors(), offset=4, vocabulary=60, metric="normalised")
    table = book.neighbours(6)
    table.save(tmp_path / "near.safetensors")
    for again in (
        Neighbours.load(tmp_path / "near.safetensors"),
        Neighbours.load(tmp_path / "near.safetensors", book),
    ):
        assert torch.equal(again.near, table.near)
        assert torch.equal(again.ids, table.ids)
        assert (again.vocabulary, again.metric) == (60, "normalised")
        assert again.fingerprint == book.fingerprint


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (Codebook.from_offset(vectors(seed=1), 4, 60), "fingerprint"),
        (Codebook.from_offset(vectors(), 5, 60), "fingerprint"),
        (Codebook.from_offset(vectors(), 4, 61), "fingerprint"),
        (Codebook.from_offset(vectors(), 4, 60, "normalised"), "metric raw instead of normalised"),
    ],
    ids=["vectors", "offset", "vocabulary", "metric"],
)
def test_a_table_of_another_codebook_is_refused(other: Codebook, says: str, tmp_path: Path) -> None:
    file = tmp_path / "near.safetensors"
    Codebook.from_offset(vectors(), 4, 60).neighbours(6).save(file)
    with pytest.raises(ValueError, match=f"belongs to another codebook.*{says}"):
        Neighbours.load(file, other)


def test_the_fingerprint_knows_the_precision_it_is_stored_in() -> None:
    assert (
        Codebook.from_offset(vectors().double()).fingerprint
        == Codebook.from_offset(vectors()).fingerprint
    )
    nudged = vectors()
    nudged[3, 2] += 1e-6
    assert Codebook.from_offset(nudged).fingerprint != Codebook.from_offset(vectors()).fingerprint


def test_another_file_is_no_table(tmp_path: Path) -> None:
    save_file({"near": torch.zeros(2, 1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="is not a neighbour table"):
        Neighbours.load(tmp_path / "other.safetensors")
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes(b"no tensors")
    for file in (torn, tmp_path / "nowhere.safetensors", tmp_path, ""):
        with pytest.raises(ValueError, match=r"cannot be read as a neighbour table|is a folder"):
            Neighbours.load(file)


def test_bad_codebooks_are_refused() -> None:
    rows, ids = vectors(5), torch.arange(5)
    for make, says in (
        (lambda: Codebook(rows[0], ids, 9), "one floating point row per code"),
        (lambda: Codebook(ids[:, None], ids, 9), "one floating point row per code"),
        (lambda: Codebook(rows, ids[:4], 9), "give one int64 token id each"),
        (lambda: Codebook(rows, ids.float(), 9), "give one int64 token id each"),
        (lambda: Codebook(rows, ids, 4), "ids go from 0 to 4"),
        (lambda: Codebook(rows, ids - 1, 9), "ids go from -1"),
        (lambda: Codebook(rows, ids // 2, 9), "its own token id"),
        (lambda: Codebook.from_offset(rows[:1]), "has no neighbours"),
        (lambda: Codebook.from_offset(rows, metric="cosine"), "metric='cosine'"),  # type: ignore[arg-type]
        (
            lambda: Codebook.from_offset(rows).neighbours(5),
            "k=5, but a code of 5 has 1 to 4 others",
        ),
        (lambda: Codebook.from_offset(rows).neighbours(0), "k=0"),
    ):
        with pytest.raises(ValueError, match=says):
            make()


def test_an_option_becomes_a_table(tmp_path: Path) -> None:
    book = Codebook.from_offset(vectors(), vocabulary=50)
    table, file = book.neighbours(8), tmp_path / "near.safetensors"
    table.save(file)
    for given in (book, table, file, str(file)):
        found = resolve_neighbours(given, 8, 50, CPU)
        assert torch.equal(found.near, table.near)
    assert resolve_neighbours(book, 1000, 50, CPU).k == 39  # all others
    for source, k, size, says in (
        (None, 8, 50, "no codebook defines"),
        (book, 8, 64, "counts 50 token ids, but the target's vocabulary has 64"),
        (table, 9, 50, "holds 8 codes per code, but neighbours=9"),
        (book, 0, 50, "leaves nothing to pool"),
    ):
        with pytest.raises(ValueError, match=says):
            resolve_neighbours(source, k, size, CPU)
    with pytest.raises(TypeError, match="codebook is a int"):
        resolve_neighbours(3, 8, 50, CPU)  # type: ignore[arg-type]
