"""A tree of everything that followed anything in some texts, with counts (SuffixDecoding).

    of [5, 6, 7, 6], to a depth of 2        5 x1 - 6 x1
                                            6 x2 - 7 x1        what follows 6: once 7
                                            7 x1 - 6 x1

Standard library alone: engines with another version of transformers import this file as well.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from threading import Lock

from mmspec.errors import check_is_file, check_number, parse_json


@dataclass
class Node:
    """How often a sequence of tokens occurred, and what followed it."""

    count: int = 0
    children: dict[int, Node] = field(default_factory=dict)


@dataclass(frozen=True)
class Guess:
    """Nodes of a draft, parents first, and the expected number that is accepted."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()  # -1 = the context
    score: float = 0.0


class SuffixTree:
    """Counts of all sequences of up to `depth` tokens of one text that grows."""

    def __init__(self, depth: int = 32, ignore: Collection[int] = ()) -> None:
        check_number("depth", depth, 2, whole=True, example=32)
        self.depth, self.ignore = depth, frozenset(ignore)
        self.root = Node()
        self.num_read = 0
        self._open: deque[Node] = deque(maxlen=depth - 1)  # nodes of the last suffixes

    def read(self, text: Sequence[int]) -> None:
        """Add the tokens since the last call; no sequence crosses one in `ignore`."""
        for token in text[self.num_read :]:
            if token in self.ignore:
                self._open.clear()
                continue
            above = [*self._open, self.root]
            self._open.clear()
            for node in above:
                child = node.children.setdefault(token, Node())
                child.count += 1
                self._open.append(child)
        self.num_read = len(text)

    def find(self, tail: Sequence[int]) -> Node | None:
        """What followed the whole of `tail`, or None."""
        node: Node | None = self.root
        for token in tail:
            node = None if node is None else node.children.get(token)
        return node


class SuffixMemory:
    """A suffix tree over the outputs of earlier requests: bounded, shared by threads, saved.

    Holds at most `max_tokens` tokens, the oldest outputs give way. Only ids are stored and no text,
    but whoever can read the object or its file can read what was generated.
    """

    def __init__(self, depth: int = 32, max_tokens: int = 1 << 16) -> None:
        check_number("max_tokens", max_tokens, 1, whole=True, example=65536)
        check_number("depth", depth, 2, whole=True, example=32)
        self.depth, self.max_tokens = depth, max_tokens
        self.lock = Lock()
        self.clear()

    def clear(self) -> None:
        """Drop all outputs."""
        with self.lock:
            self.root, self.outputs, self.num_tokens = Node(), deque[tuple[int, ...]](), 0

    def add(self, output: Sequence[int]) -> None:
        """Add the output of a request; of a longer one than `max_tokens` the end."""
        kept = tuple(output)[-self.max_tokens :]
        if not kept:
            return
        with self.lock:
            self.outputs.append(kept)
            self.num_tokens += len(kept)
            self._count(kept, 1)
            while self.num_tokens > self.max_tokens:
                oldest = self.outputs.popleft()
                self.num_tokens -= len(oldest)
                self._count(oldest, -1)

    def find(self, tail: Sequence[int]) -> Node | None:
        """As `SuffixTree.find`."""
        node: Node | None = self.root
        for token in tail:
            node = None if node is None else node.children.get(token)
        return node

    def save(self, path: str | Path) -> None:
        """Write the outputs as JSON."""
        with self.lock:
            content = {"depth": self.depth, "max_tokens": self.max_tokens}
            Path(path).write_text(json.dumps(content | {"outputs": [*map(list, self.outputs)]}))

    @classmethod
    def load(cls, path: str | Path) -> SuffixMemory:
        """Read what `save` wrote. Raises ValueError for other content."""
        try:
            check_is_file(Path(path))
            content = parse_json(Path(path).read_text(encoding="utf-8"))
            memory = cls(int(content["depth"]), int(content["max_tokens"]))
            for output in content["outputs"]:
                memory.add([int(token) for token in output])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is not a suffix memory ({type(error).__name__}); give a file written by "
                "SuffixMemory.save"
            ) from None
        return memory

    def _count(self, output: Sequence[int], step: int) -> None:
        for first in range(len(output)):
            node = self.root
            for token in output[first : first + self.depth]:
                child = node.children.setdefault(token, Node())
                child.count += step
                if not child.count:
                    del node.children[token]
                    break  # nothing longer is left below it
                node = child


def speculate(
    tree: SuffixTree | SuffixMemory, tail: Sequence[int], nodes: int, factor: float, floor: float
) -> Guess:
    """The best draft over all suffixes of `tail` that occurred (SuffixDecoding, 2024).

    A match of m tokens allows up to factor x m nodes, at most `nodes`. A path has the product of
    the shares of its tokens among what followed, at least `floor`; the score of a draft is the sum
    over its nodes, and ties go to the longer match.
    """
    best = Guess()
    for size in range(min(len(tail), tree.depth - 1), 0, -1):
        node = tree.find(tail[-size:])
        if node is None or not node.children:
            continue
        found = _grow(node, min(nodes, int(factor * size)), floor)
        if found.score > best.score:
            best = found
    return best


def _grow(node: Node, limit: int, floor: float) -> Guess:
    """The most probable nodes below one, best first."""
    tokens, parents, score = list[int](), list[int](), 0.0
    heap: list[tuple[float, int, int, int, Node]] = []
    serial = 0

    def offer(above: Node, share: float, parent: int) -> None:
        nonlocal serial
        total = sum(child.count for child in above.children.values())
        for token, child in above.children.items():
            weight = share * child.count / total
            if weight >= floor:
                serial += 1
                heappush(heap, (-weight, serial, parent, token, child))

    offer(node, 1.0, -1)
    while heap and len(tokens) < limit:
        negative, _, parent, token, child = heappop(heap)
        tokens.append(token)
        parents.append(parent)
        score -= negative
        offer(child, -negative, len(tokens) - 1)
    return Guess(tuple(tokens), tuple(parents), score)
