"""Phrases are merged from frequent neighbours and matched in drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mmspec.codes.phrases import Phrases, Trie

CPU = torch.device("cpu")
ROWS = [[1, 2, 3, 1, 2, 4], [1, 2, 3, 5, 5, 6], [3, 1, 2, 3, 0, 0]]


def test_merging_by_hand() -> None:
    """(1, 2) occurs four times; then 1 2 is followed by 3 three times, and by 4 once."""
    assert dict(Phrases.build(ROWS).counts) == {(1, 2): 4, (1, 2, 3): 3}
    assert dict(Phrases.build(ROWS, longest=2).counts) == {(1, 2): 4}
    assert dict(Phrases.build(ROWS, merges=1).counts) == {(1, 2): 4}
    assert len(Phrases.build(ROWS, merges=0)) == 0
    assert len(Phrases.build([], merges=5)) == 0
    assert (0, 0) in Phrases.build(ROWS, min_count=1).counts


def test_no_phrase_goes_beyond_a_row() -> None:
    joined = Phrases.build([[1, 2], [3, 4], [1, 2], [3, 4]])
    assert set(joined.counts) == {(1, 2), (3, 4)}
    assert (1, 2, 3) in Phrases.build([[1, 2, 3, 4, 1, 2, 3, 4]]).counts


def test_saving_and_loading(tmp_path: Path) -> None:
    for library in (Phrases.build(ROWS, min_count=1), Phrases()):
        library.save(tmp_path / "phrases.safetensors")
        assert Phrases.load(tmp_path / "phrases.safetensors") == library
    save_file({"other": torch.zeros(1)}, str(tmp_path / "no.safetensors"))
    with pytest.raises(ValueError, match="holds other, not tokens and counts"):
        Phrases.load(tmp_path / "no.safetensors")


def test_matches_are_those_of_a_slow_search() -> None:
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 4, (50, 9), generator=random)
    allowed = torch.rand(50, 9, generator=random) < 0.9
    tokens[0, 3:7], allowed[0] = torch.arange(4), True
    library = Phrases({(0, 1): 1, (0, 1, 2, 3): 1, (2, 2): 1, (3, 0, 3): 1, (1, 1, 1): 1})
    found = Trie.build(library, 4, CPU).matches(tokens, allowed)
    for row in range(50):
        for place in range(9):
            longest = 0
            for phrase in library.counts:
                run = slice(place, place + len(phrase))
                fits = tuple(tokens[row, run].tolist()) == phrase and bool(allowed[row, run].all())
                longest = max(longest, len(phrase) if fits else 0)
            assert found[row, place] == longest
    assert set(found.unique().tolist()) == {0, 2, 3, 4}
    empty = Trie.build(Phrases(), 4, CPU)
    assert int(empty.matches(tokens, allowed).sum()) == 0


def test_what_is_no_library_file_is_refused(tmp_path: Path) -> None:
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes(b"no tensors")
    for file in (torn, tmp_path / "nowhere.safetensors", tmp_path):
        with pytest.raises(ValueError, match=r"cannot be read as a phrase library|is a folder"):
            Phrases.load(file)


def test_what_is_no_library_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3,\) is not a phrase"):
        Phrases({(3,): 2})
    with pytest.raises(ValueError, match="outside the vocabulary of 4"):
        Trie.build(Phrases({(1, 7): 2}), 4, CPU)
    with pytest.raises(ValueError, match="longest=1"):
        Phrases.build(ROWS, longest=1)
