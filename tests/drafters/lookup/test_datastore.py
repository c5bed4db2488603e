"""A datastore finds the longest suffix that occurs, and what followed it most often."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from mmspec.drafters.lookup.datastore import SEPARATOR, Datastore

TEXTS = [[1, 2, 3, 4], [1, 2, 3, 5], [9, 1, 2, 6], [1, 2, 3, 4, 8]]


def search(
    sequences: list[list[int]],
    text: list[int],
    length: int,
    longest: int,
    shortest: int,
) -> list[int]:
    """Look at every position of every sequence."""
    chain: list[int] = []
    for size in range(min(longest, len(text)), shortest - 1, -1):
        tail = text[len(text) - size :]
        rests = [
            [*sequence[end:], SEPARATOR]
            for sequence in sequences
            for end in range(size, len(sequence) + 1)
            if sequence[end - size : end] == tail
        ]
        if not rests:
            continue
        while len(chain) < length:
            counts = Counter(rest[len(chain)] for rest in rests)
            token = min(counts, key=lambda one: (-counts[one], one))  # of equal counts the smallest
            if token == SEPARATOR:
                break
            chain.append(token)
            rests = [rest for rest in rests if rest[len(chain) - 1] == token]
        break
    return chain


@pytest.mark.parametrize("symbols", [1, 2, 4, 30])
@pytest.mark.parametrize("seed", range(3))
def test_it_finds_what_a_search_finds(symbols: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, symbols, rng.integers(0, 40)).tolist() for _ in range(12)]
    sequences += [sequences[0], [0, 0]]  # repeated as a whole
    made, drafted = Datastore.of(sequences), 0
    for _ in range(60):
        text = rng.integers(0, symbols + 1, rng.integers(1, 12)).tolist()
        for longest, shortest in ((16, 1), (4, 2)):
            chain = made.continuation(text, 6, longest, shortest)
            assert chain == search(sequences, text, 6, longest, shortest)
            drafted += len(chain)
    assert drafted > 30


def test_the_longest_suffix_counts_and_then_the_most_frequent_token() -> None:
    made = Datastore.of(TEXTS)
    assert made.continuation([1, 2], 5) == [3, 4]  # 3 of four, then 4 of three, then the end of one
    assert made.continuation([9, 1, 2], 5) == [6]
    assert made.continuation([0, 1, 2, 3, 4], 5, shortest=5) == []
    assert made.continuation([2, 3, 4], 1) == []  # ends as often as it goes on with 8
    assert made.continuation([3, 7], 5) == []
    assert made.continuation([7], 5) == []
    made.check_vocabulary(10)
    with pytest.raises(ValueError, match="token id 9, but the target's vocabulary has 9; build"):
        made.check_vocabulary(9)


def test_nothing_matches_across_sequences_or_ignored_ids() -> None:
    made = Datastore.of([[1, 2, 3], [4, 5, 6]])
    assert made.continuation([2, 3], 4) == []
    assert made.continuation([3, SEPARATOR], 4, shortest=1) == []
    assert made.continuation([3, SEPARATOR, 4, 5], 4) == [6]


def test_many_occurrences_are_sampled_evenly() -> None:
    made = Datastore.of([[1, 2, 3]] * 3000 + [[1, 2, 4]] * 6000)
    assert made.continuation([1, 2], 2) == [4]


@pytest.mark.parametrize("name", ["store.npz", "store.jsonl"])
def test_a_saved_datastore_is_the_same(name: str, tmp_path: Path) -> None:
    made, path = Datastore.of(TEXTS), tmp_path / name
    if name.endswith("npz"):
        made.save(path)
    else:
        path.write_text("\n".join(map(str, TEXTS)) + "\n\n")
    loaded = Datastore.load(path)
    assert np.array_equal(loaded.tokens, made.tokens)
    assert np.array_equal(loaded.order, made.order)


def test_other_files_are_refused(tmp_path: Path) -> None:
    good = Datastore.of(TEXTS)
    np.savez(tmp_path / "keys.npz", tokens=good.tokens)
    np.savez(tmp_path / "mixed.npz", tokens=good.tokens, order=good.order[::-1])
    np.savez(tmp_path / "double.npz", tokens=good.tokens, order=np.sort(good.tokens).astype(int))
    np.savez(tmp_path / "wide.npz", tokens=good.tokens.astype(np.int64), order=good.order)
    (tmp_path / "text.jsonl").write_text('{"a": 1}')
    (tmp_path / "words.jsonl").write_text('["a", "b"]')
    (tmp_path / "short.jsonl").write_text("[1]\n[2]")
    (tmp_path / "torn.npz").write_bytes(b"PK\x03\x04")
    names = ("keys.npz", "mixed.npz", "double.npz", "wide.npz", "torn.npz", "text.jsonl")
    for name in (*names, "words.jsonl", "short.jsonl", "nowhere.npz"):
        with pytest.raises(ValueError, match=f"{name} is not a datastore .*; give a file written"):
            Datastore.load(tmp_path / name)


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([], "no sequence of at least 2 tokens"),
        ([[1], []], "no sequence of at least 2 tokens"),
        ([[1, 2], [3, -1]], "sequence 1 .* from 0 on"),
        ([[1.5, 2.0]], "sequence 0 .* whole numbers"),
        ([[[1, 2]]], "sequence 0"),
        ([[1, 2**40]], "does not fit in 32 bits"),
    ],
)
def test_other_sequences_are_refused(sequences: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Datastore.of(sequences)


def test_it_is_importable_without_torch_and_transformers() -> None:
    code = (
        "import sys, mmspec.drafters.lookup.datastore; "
        "assert not {'torch', 'transformers'} & {*sys.modules}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
