"""SuffixDecoding: branches that followed the last tokens, in the request and in earlier outputs."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.drafters.lengths.length import max_useful_length
from mmspec.drafters.lookup.retrieved_tree import nodes_of, pad_trees
from mmspec.drafters.lookup.suffix_tree import Guess, SuffixMemory, SuffixTree, speculate
from mmspec.errors import check_number
from mmspec.recipe import Kit
from mmspec.targets.rows import swap_out
from mmspec.targets.tokens.context import Context


class SuffixDecoding(Drafter):
    """Drafts the likeliest branches of two suffix trees (SuffixDecoding, Oliaro et al. 2024).

    One tree is of the row's prompt and output, the other is the `memory` of earlier outputs, if
    there is one; the draft of the higher score is taken. Rows that finish are added to the memory.
    It decides what is drafted, never what is output: greedy and coupled tokens are the same with
    any memory. Deterministic proposals: exact with every lossless verifier. Token ids in `ignore`
    (image placeholders) are never matched.
    """

    kinds: tuple[Kind, ...] = (Kind.DET,)
    uses_trees: bool = True

    def __init__(
        self,
        nodes: int = 32,
        memory: SuffixMemory | None = None,
        factor: float = 2.0,
        floor: float = 0.1,
        depth: int = 32,
        ignore: frozenset[int] = frozenset(),
    ) -> None:
        check_number("nodes", nodes, 1, whole=True, example=32)
        check_number("factor", factor, 0, example=2.0)
        check_number("floor", floor, 0, 1, example=0.1)
        self.nodes, self.memory, self.factor, self.floor = nodes, memory, factor, floor
        self.depth, self.ignore = depth, ignore

    def begin(self, context: Context) -> SuffixState:
        trees = [SuffixTree(self.depth, self.ignore) for _ in context.history]
        return SuffixState(trees, [False] * context.batch)

    def propose(self, context: Context, state: SuffixState) -> Draft:
        room = max_useful_length(context)
        found = []
        for tree, text, done in zip(state.trees, context.history, context.finished, strict=True):
            tree.read(text)
            guess = Guess() if done or not room else self._guess(tree, text)
            found.append(_cut(guess, room))
        return pad_trees(context, found, min(room, self.nodes))

    def observe(
        self, context: Context, state: SuffixState, draft: Draft, scores: Scores, round_: Round
    ) -> SuffixState:
        for row, done in enumerate(round_.finished):
            if done and not state.stored[row]:
                state.stored[row] = True
                if self.memory is not None:
                    self.memory.add(context.history[row][context.prompt[row] :])
        return state

    def _guess(self, tree: SuffixTree, text: list[int]) -> Guess:
        tail = text[-self.depth :]
        best = speculate(tree, tail, self.nodes, self.factor, self.floor)
        if self.memory is not None:
            with self.memory.lock:
                other = speculate(self.memory, tail, self.nodes, self.factor, self.floor)
            best = max(best, other, key=lambda guess: guess.score)
        return best


@dataclass
class SuffixState:
    """The trees of a request's rows, and which rows are in the memory already."""

    trees: list[SuffixTree]
    stored: list[bool]

    def join(self, other: SuffixState) -> None:
        """Append the rows of another request."""
        self.trees += other.trees
        self.stored += other.stored

    def drop(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        swap_out(self.trees, row)
        swap_out(self.stored, row)


def _cut(guess: Guess, depth: int) -> tuple[list[int], list[int]]:
    """The nodes of a guess that are at most `depth` tokens deep."""
    depths: list[int] = []
    index, tokens, parents = {-1: -1}, list[int](), list[int]()
    for node, (token, parent) in enumerate(zip(guess.tokens, guess.parents, strict=True)):
        depths.append(1 if parent < 0 else depths[parent] + 1)
        if depths[node] <= depth:
            index[node] = len(tokens)
            tokens.append(token)
            parents.append(index[parent])
    return tokens, parents


def suffix_decoding(kit: Kit) -> Drafter:
    """Suffix trees of the request and of a memory. Raises ValueError for other objects."""
    memory = kit.load_option("memory", SuffixMemory)
    options, ignore = kit.options, frozenset(kit.target.visual_ids)
    limits = (options["factor"], options["floor"])
    return SuffixDecoding(nodes_of(kit), memory, *limits, ignore=ignore)
