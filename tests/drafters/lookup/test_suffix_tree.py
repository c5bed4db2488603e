"""Suffix trees count as brute force does, and a memory stays bounded, whole and shared."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from threading import Thread

import pytest

from mmspec.drafters.lookup.suffix_tree import Node, SuffixMemory, SuffixTree, speculate


def counts(node: Node, above: tuple[int, ...] = ()) -> dict[tuple[int, ...], int]:
    found = {}
    for token, child in node.children.items():
        found[*above, token] = child.count
        found |= counts(child, (*above, token))
    return found


def brute(texts: list[list[int]], depth: int) -> dict[tuple[int, ...], int]:
    found: Counter[tuple[int, ...]] = Counter()
    for text in texts:
        for first in range(len(text)):
            for end in range(first + 1, min(first + depth, len(text)) + 1):
                found[tuple(text[first:end])] += 1
    return dict(found)


def test_a_growing_text_is_counted() -> None:
    random = Random(0)
    text = [random.randrange(4) for _ in range(60)]
    tree = SuffixTree(depth=5)
    for end in (1, 7, 8, 30, 60):
        tree.read(text[:end])
        assert counts(tree.root) == brute([text[:end]], 5)
    cut = SuffixTree(depth=5, ignore={9})
    cut.read([1, 2, 9, 2, 1])
    assert counts(cut.root) == brute([[1, 2], [2, 1]], 5)


def test_a_memory_holds_the_last_outputs() -> None:
    random = Random(1)
    outputs = [[random.randrange(3) for _ in range(random.randrange(1, 9))] for _ in range(30)]
    memory = SuffixMemory(depth=4, max_tokens=20)
    for output in outputs:
        memory.add(output)
    kept = [list(one) for one in memory.outputs]
    assert outputs[-len(kept) :] == kept
    assert sum(map(len, kept)) == memory.num_tokens <= 20
    assert counts(memory.root) == brute(kept, 4)
    memory.add(list(range(50)))
    assert [list(one) for one in memory.outputs] == [list(range(30, 50))]
    memory.clear()
    assert (counts(memory.root), memory.num_tokens) == ({}, 0)


def test_a_memory_is_saved(tmp_path: Path) -> None:
    memory = SuffixMemory(depth=4, max_tokens=20)
    for output in ([1, 2, 3], [1, 2, 4], []):
        memory.add(output)
    memory.save(tmp_path / "memory.json")
    again = SuffixMemory.load(tmp_path / "memory.json")
    assert counts(again.root) == counts(memory.root)
    assert (again.depth, again.max_tokens) == (4, 20)
    (tmp_path / "other.json").write_text('{"depth": 4}')
    for wrong in ("other.json", "missing.json"):
        with pytest.raises(ValueError, match="is not a suffix memory"):
            SuffixMemory.load(tmp_path / wrong)


def test_a_memory_is_shared_by_threads() -> None:
    memory = SuffixMemory(depth=4, max_tokens=300)

    def work(seed: int) -> None:
        random = Random(seed)
        for _ in range(60):
            memory.add([random.randrange(3) for _ in range(6)])
            with memory.lock:
                speculate(memory, [0, 1], 8, 2.0, 0.1)

    threads = [Thread(target=work, args=(seed,)) for seed in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert counts(memory.root) == brute([list(one) for one in memory.outputs], 4)


def test_a_memory_that_is_being_written_is_cleared_afterwards() -> None:
    """Counts of an output would else be taken from a tree that never had them."""
    memory = SuffixMemory()
    memory.add([1, 2, 3])
    clearing = Thread(target=memory.clear)
    with memory.lock:
        clearing.start()
        clearing.join(0.05)
        assert memory.outputs
    clearing.join()
    assert not memory.outputs
    assert counts(memory.root) == {}


def test_the_most_probable_nodes_are_drafted() -> None:
    tree = SuffixTree(depth=8)
    tree.read([7, 1, 2, 7, 1, 3, 7, 1, 2, 7, 4, 9, 7])
    found = speculate(tree, [9, 7], 4, 9.0, 0.0)  # 7 - 1 (3/4) - 2 (2/3 of it), 4 (1/4), ...
    assert found.tokens[:2] == (1, 2)
    assert found.parents[:2] == (-1, 0)
    assert found.score == pytest.approx(0.75 + 0.5 + 0.5 + 0.25)  # 1, 2, 7, and one of four
    short = speculate(tree, [9, 7], 4, 1.0, 0.0)
    assert short.tokens == (1,)  # a match of one token allows one node
    assert speculate(tree, [9, 7], 4, 9.0, 0.6).tokens == (1,)
    assert speculate(tree, [8], 4, 9.0, 0.0).tokens == ()
    with pytest.raises(ValueError, match="depth=1 must be a whole number"):
        SuffixTree(depth=1)
