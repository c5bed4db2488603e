"""Lookahead decoding: Jacobi iteration finds n-grams, and those of the last token are verified.

One forward reads two branches; `.` is the last committed token, W = 3 columns, N = 4.

    lookahead   .  - a1 - a2          level 0, a chain of guesses
                |    |    |
                b0   b1   b2          level 1, each the child of the token above it
                |    |    |
                c0   c1   c2          level 2; the target's tokens after c are level 3
    verified    .  - x - y - z        an n-gram that followed this token before, up to G of them

The n-gram (b1, c1, level 3) is stored for a1. Then every level becomes the one above it, and the
columns move by the committed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import cycle, islice
from typing import ClassVar

import torch

from mmspec.distributions.categorical import as_categorical
from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.drafters.lengths.length import max_useful_length
from mmspec.errors import check_number
from mmspec.recipe import TREE, Kit
from mmspec.targets.rows import swap_out
from mmspec.targets.tokens.context import Context
from mmspec.trees import Tree

Ngram = tuple[int, ...]


@dataclass(frozen=True)
class TwoBranches:
    """The shape of a draft: the window, which is never accepted, and the n-grams."""

    walk: ClassVar[str] = TREE
    description: ClassVar[str] = "window of columns and levels, and chains of n-grams"


@dataclass(frozen=True)
class Lookahead(Drafter):
    """Drafts n-grams of its own Jacobi iterations (Fu et al. 2024).

    `window` columns (W), n-grams of `ngram` tokens with the one they follow (N), and up to
    `guesses` of them per token (G), the least recently found ones dropped. A draft has up to
    (W - 1) + W (N - 2) + G (N - 1) nodes. With `read_prompt` the n-grams of the prompt are stored
    first. Token ids in `ignore` (image placeholders) are neither guessed nor stored. Exact with
    every lossless verifier: window nodes cannot be accepted. When sampling, the window takes the
    target's tokens with the noise of their positions, which with `Coupled` is Jacobi iteration
    towards the sample of plain decoding; the authors' code takes the most probable tokens.
    Reconstructed: all levels start as tokens of the prompt, and so do columns that the window has
    moved past.

    Raises ValueError for sizes that leave no window or no n-gram.
    """

    window: int = 15
    ngram: int = 5
    guesses: int = 15
    read_prompt: bool = True
    ignore: frozenset[int] = frozenset()  # ids
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET,)
    uses_trees: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number("window", self.window, 1, whole=True, example=15)
        check_number("ngram", self.ngram, 3, whole=True, example=5)
        check_number("guesses", self.guesses, 1, whole=True, example=15)

    def begin(self, context: Context) -> LookaheadState:
        return LookaheadState([RowWindow() for _ in range(context.batch)])

    def propose(self, context: Context, state: LookaheadState) -> Draft:
        useful = max_useful_length(context)
        columns = max(min(self.window, useful - self.ngram + 3), 0)
        depth = min(self.ngram - 1, useful)
        found = []
        for row, text in enumerate(context.history):
            state.rows[row].start(text, self, context.vocabulary)
            known = state.rows[row].pool.get(text[-1], {})
            found.append([] if context.finished[row] else [one[:depth] for one in reversed(known)])
        guesses = max(map(len, found)) if depth else 0
        state.columns = columns
        tree = state.tree = build_tree(columns, self.ngram - 1, guesses, depth)
        if not tree.nodes:
            return context.empty_draft()
        tokens, mask = [], []
        for row, ngrams in enumerate(found):
            last = context.history[row][-1]
            window = state.rows[row].flatten(columns)
            drafted = [token for ngram in ngrams for token in ngram]
            missing = tree.nodes - len(window) - len(drafted)
            tokens.append(window + drafted + [last] * missing)
            mask.append([False] * len(window) + [True] * len(drafted) + [False] * missing)
        return Draft.from_tree(
            tree,
            torch.tensor(tokens, device=context.device),
            Kind.DET,
            mask=torch.tensor(mask, device=context.device),
        )

    def observe(
        self, context: Context, state: LookaheadState, draft: Draft, scores: Scores, round_: Round
    ) -> LookaheadState:
        """Store the n-grams of the window and move it past the committed tokens."""
        columns = state.columns
        if not draft.nodes or not columns or draft.tree is not state.tree:
            return state  # nothing of the window was read: in a pool another drafter may draft
        last = self.ngram - 2  # nodes of a column
        ends = [columns - 1 + last * column + last for column in range(columns)]  # rows of scores
        p = as_categorical(scores.distribution)[:, ends]
        found = p.sample(context.noise.shared_keys(scores.position[:, ends])).tolist()
        for row, tokens in enumerate(found):
            committed = len(round_.tokens[row])
            if committed:
                root = context.history[row][-1 - committed]
                state.rows[row].move(root, tokens, committed, self)
        return state


@dataclass
class RowWindow:
    """The levels and the n-grams of a row; an n-gram is stored without the token it follows."""

    levels: list[list[int]] = field(default_factory=list)  # 0: a1, a2, ...; j: column 0, 1, ...
    pool: dict[int, dict[Ngram, None]] = field(default_factory=dict)  # most recent last
    words: list[int] = field(default_factory=list)  # tokens of the prompt
    num_filled: int = 0

    def start(self, text: Sequence[int], sizes: Lookahead, vocabulary: int) -> None:
        """Fill the window, and store the n-grams of the prompt; once.

        Prompts of another vocabulary, such as classes of images, fill it only in part.
        """
        if self.levels:
            return
        readable = range(vocabulary)
        known = [token for token in text if token in readable and token not in sizes.ignore]
        self.words = known or [text[-1]]
        self.levels = [self.fill(sizes.window - (level == 0)) for level in range(sizes.ngram - 1)]
        if sizes.read_prompt:
            for at in range(1, len(text) - sizes.ngram + 2):
                ngram = tuple(text[at : at + sizes.ngram - 1])
                if all(token in readable for token in ngram):
                    self.store(text[at - 1], ngram, sizes)

    def fill(self, count: int) -> list[int]:
        """The next `count` tokens of the prompt, which begins again at its end."""
        first = self.num_filled % len(self.words)
        self.num_filled += count
        return list(islice(cycle(self.words), first, first + count))

    def flatten(self, columns: int) -> list[int]:
        """Tokens of the nodes of `build_tree`: level 0, then column by column."""
        if not columns:
            return []
        below = zip(*(level[:columns] for level in self.levels[1:]), strict=True)
        return self.levels[0][: columns - 1] + [token for column in below for token in column]

    def store(self, token: int, ngram: Ngram, sizes: Lookahead) -> None:
        """Store an n-gram that followed `token`; the least recent one gives way."""
        if not sizes.ignore.isdisjoint((token, *ngram)):
            return
        known = self.pool.setdefault(token, {})
        known.pop(ngram, None)
        known[ngram] = None
        if len(known) > sizes.guesses:
            del known[next(iter(known))]

    def move(self, root: int, found: list[int], committed: int, sizes: Lookahead) -> None:
        """Store one n-gram per column; `found` are the target's tokens after the last level."""
        above = [root, *self.levels[0]]
        levels = [level[: len(found)] for level in self.levels[1:]] + [found]
        for column, token in enumerate(above[: len(found)]):
            self.store(token, tuple(level[column] for level in levels), sizes)
        first = levels[0][committed:]  # column c is one position before the new a_{c + 1}
        self.levels = [first + self.fill(sizes.window - 1 - len(first))]
        for level in levels[1:]:
            left = level[committed - 1 :]
            self.levels.append(left + self.fill(sizes.window - len(left)))


@dataclass
class LookaheadState:
    """The state of a request."""

    rows: list[RowWindow]
    columns: int = 0  # of the window in this round
    tree: Tree | None = None  # of its draft

    def join(self, other: LookaheadState) -> None:
        """Append the rows of another request."""
        self.rows += other.rows

    def drop(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        swap_out(self.rows, row)


@lru_cache(maxsize=256)
def build_tree(columns: int, levels: int, guesses: int, depth: int) -> Tree:
    """The window of `columns` and `levels`, then `guesses` chains of `depth` nodes."""
    parents = list(range(-1, columns - 2))  # level 0: a1, a2, ...
    for column in range(columns):
        above = column - 1
        for _ in range(1, levels):
            parents.append(above)
            above = len(parents) - 1
    for _ in range(guesses):
        for step in range(depth):
            parents.append(len(parents) - 1 if step else -1)
    return Tree(tuple(parents))


def lookahead(kit: Kit) -> Drafter:
    """A window of Jacobi iterations and the n-grams found in it.

    Raises ValueError for a shape, and for a target that reads chains only.
    """
    if not kit.target.can_branch:
        raise ValueError(
            f"{type(kit.target.model).__name__} {kit.target.obstacle}, and lookahead reads a "
            "window beside the text; use recipe='suffix', which drafts chains"
        )
    if not isinstance(kit.shape, TwoBranches):
        raise ValueError(
            "lookahead has a shape of its own; give window=, ngram= and guesses= instead of "
            "tree= or length="
        )
    sizes = {name: kit.options[name] for name in ("window", "ngram", "guesses", "read_prompt")}
    return Lookahead(**sizes, ignore=frozenset(kit.target.visual_ids))
