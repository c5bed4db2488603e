"""Indexes find what a search finds, and copies end where they must."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from mmspec.drafters.lookup.text_index import NGramIndex, copy_tokens


@pytest.mark.parametrize("ignore", [frozenset[int](), frozenset({0})])
def test_the_index_read_token_by_token_equals_a_search(ignore: frozenset[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, 3, (200,), generator=generator).tolist()
    index = NGramIndex(3, ignore)
    for end in range(1, len(text)):
        index.read(text[:end])
        assert index.find(text[:end]) == _search(text[:end], 3, ignore)


def _search(text: list[int], longest: int, ignore: frozenset[int]) -> int | None:
    for size in range(min(longest, len(text)), 0, -1):
        for place in range(len(text) - 1, size - 1, -1):
            gram = text[place - size : place]
            if gram == text[-size:] and not ignore & {*gram, text[place]}:
                return place
    return None


def test_copy_stops_at_ignored_ids() -> None:
    assert copy_tokens([1, 2, 3, 0, 4], 1, 5, {0}) == [2, 3]
    assert copy_tokens([1, 2], None, 5, ()) == []


def test_indexes_are_importable_without_torch_and_transformers() -> None:
    """An engine's environment has its own version of transformers (plugins/vllm)."""
    code = (
        "import sys, mmspec.drafters.lookup.automaton, mmspec.drafters.lookup.text_index; "
        "assert not {'torch', 'transformers', 'numpy'} & {*sys.modules}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
