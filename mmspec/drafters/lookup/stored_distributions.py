"""STAND: distributions that the target had after the same n-gram are drawn from again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from mmspec.distributions.categorical import Categorical, as_categorical
from mmspec.draft import Drafter
from mmspec.drafters.draft_model import DraftModel, DraftNodes, DraftUpdate
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.drafters.shapes import Shape
from mmspec.errors import check_number
from mmspec.recipe import Kit
from mmspec.targets.rows import swap_out
from mmspec.targets.tokens.context import Context

Entry = tuple[tuple[int, ...], tuple[float, ...]]  # tokens, log-probabilities


@dataclass(frozen=True)
class StoredDistributions(DraftModel):
    """The target's distribution after the last n tokens when they occurred before (STAND, 2025).

    Of every distribution the `kept` most probable tokens are stored, renormalised, under the n
    tokens before it, n = `longest` .. 1; the longest known n-gram counts, and the last distribution
    seen after it. Where none is known the last token is repeated. Siblings are drawn without
    replacement by Gumbel top-k; the recorded q is the stored distribution, so rejection sampling
    over siblings is exact. The rows of a batch have stores of their own.
    """

    longest: int = 4
    kept: int = 10
    sees: ClassVar[str] = "nothing"

    def __post_init__(self) -> None:
        check_number("longest", self.longest, 1, whole=True, example=4)
        check_number("kept", self.kept, 1, whole=True, example=10)

    def begin(self, context: Context) -> StoredState:
        return StoredState([{} for _ in range(context.batch)])

    def predict_first(self, context: Context, state: StoredState) -> Categorical:
        state.read = [[] for _ in range(context.batch)]
        tails = [[tuple(text[-self.longest :])] for text in context.history]
        return self._look_up(context, state, tails)

    def predict(self, context: Context, state: StoredState, nodes: DraftNodes) -> Categorical:
        layout = nodes.layout
        parents = layout.parents.expand(context.batch, -1).tolist()
        tails: list[list[tuple[int, ...]]] = []
        for row, tokens in enumerate(nodes.tokens.tolist()):
            known, own = state.read[row], []
            for token, parent in zip(tokens, parents[row], strict=True):
                above = known[parent - 1] if parent else context.history[row][-self.longest :]
                own.append(tuple([*above, token][-self.longest :]))
                known.append(own[-1])
            tails.append(own)
        return self._look_up(context, state, tails)

    def keep(self, context: Context, state: StoredState, update: DraftUpdate) -> StoredState:
        """Store the distributions after the context and after the accepted nodes."""
        distribution = as_categorical(update.scores.distribution)
        best = distribution.scores.log_softmax(-1).topk(min(self.kept, distribution.size), -1)
        tokens, logs = best.indices.tolist(), best.values.tolist()
        state.is_greedy = distribution.hard
        for row, new in enumerate(update.round.tokens):
            places = [0, *(node + 1 for node in update.round.path[row])][: len(new)]
            text = context.history[row]
            for step, place in enumerate(places):
                end = len(text) - len(new) + step
                self._store(
                    state.rows[row],
                    text[:end][-self.longest :],
                    tokens[row][place],
                    logs[row][place],
                )
        return state

    def _store(
        self,
        store: dict[tuple[int, ...], Entry],
        before: Sequence[int],
        tokens: Sequence[int],
        logs: Sequence[float],
    ) -> None:
        real = [at for at, log in enumerate(logs) if log > -torch.inf]
        entry = tuple(tokens[at] for at in real), tuple(logs[at] for at in real)
        for size in range(1, len(before) + 1):
            store[tuple(before[-size:])] = entry

    def _look_up(
        self, context: Context, state: StoredState, tails: Sequence[Sequence[tuple[int, ...]]]
    ) -> Categorical:  # (B, n)
        """Dense distributions of the stored entries."""
        entries = [
            [self._find(state.rows[row], tail) for tail in own] for row, own in enumerate(tails)
        ]
        width = max(len(tokens) for own in entries for tokens, _ in own)
        ids = [[[*t, *[t[0]] * (width - len(t))] for t, _ in own] for own in entries]
        logs = [
            [[*values, *[values[0]] * (width - len(values))] for _, values in own]
            for own in entries
        ]
        device = context.device
        index, values = torch.tensor(ids, device=device), torch.tensor(logs, device=device)
        empty = torch.full((*index.shape[:2], context.vocabulary), -torch.inf, device=device)
        scores = empty.scatter(-1, index, values)
        return Categorical(scores, hard=state.is_greedy)

    def _find(self, store: dict[tuple[int, ...], Entry], tail: tuple[int, ...]) -> Entry:
        for size in range(len(tail), 0, -1):
            found = store.get(tail[-size:])
            if found is not None:
                return found
        return (max(tail[-1], 0),), (0.0,)


@dataclass
class StoredState:
    """The stores of a request's rows, and the ends of the nodes read in this round."""

    rows: list[dict[tuple[int, ...], Entry]]
    read: list[list[tuple[int, ...]]] = field(default_factory=list)
    is_greedy: bool = False  # whether stored distributions rank tokens only

    def join(self, other: StoredState) -> None:
        """Append the rows of another request."""
        self.rows += other.rows

    def drop(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        swap_out(self.rows, row)


def stored_distributions(kit: Kit) -> Drafter:
    """Distributions that the target had after the same n-gram."""
    assert isinstance(kit.shape, Shape)
    model = StoredDistributions(kit.options["longest"], kit.options["kept"])
    return Autoregressive(model, kit.shape)
