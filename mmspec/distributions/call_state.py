"""Calls of logits processors and stopping criteria: state between calls, noticed or declared.

A logits processor is called on drafts that are dropped later, and a stopping criterion row by row,
so one that counts its calls or stores tokens would change the output. What a function holds are its
attributes, the variables of its closure and its default arguments. They may change in the first
call, which may prepare values, and not after it.

A processor that returns its state instead (`StatefulProcessor`) can be used: the states of a row
are kept in a tree, whose root moves with the committed tokens.

    committed   {"a":     state s          "  state t, a fork of s
    draft           1  /     \\  "       1  state u, another fork

Processors without state are called with nodes whose prefixes are equally long, together.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, PrefixConstrainedLogitsProcessor

from mmspec.errors import format_value
from mmspec.trees import NodePrefix

DEPTH = 4  # of nested containers and objects
MAX_VALUES = 500  # looked at per function, so that a large table costs little
MAX_BYTES = 4096  # of an array whose contents are compared
_PLAIN = (int, str, bytes, bool, type(None))


class StateWatch:
    """Compares what a function holds with what it held after its first call."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.state: Mapping[str, Any] | None = None

    def run(self, call: Callable[[], Tensor]) -> Tensor:
        """The result of `call`, which calls the function; the first time it is called twice.

        Raises ValueError if the results differ, or the state.
        """
        result = call()
        if self.state is None:
            self.check()
            again = call()
            if not bool(((result == again) | (result.isnan() & again.isnan())).all()):
                raise self._error("it answers the same input twice differently")
        self.check()
        return result

    def check(self) -> None:
        """Compare the state with the first one. Raises ValueError for a change."""
        now = describe_state(self.function)
        if self.state is None:
            self.state = now
        for name in now.keys() | self.state.keys():
            if now.get(name) != self.state.get(name):
                raise self._error(f"{name} changed")

    def _error(self, reason: str) -> ValueError:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return ValueError(
            f"{name} keeps state between calls ({reason}), and here it is also called on drafted "
            "tokens that are dropped, and row by row: compute its result from its arguments alone, "
            "or use model.generate()"
        )


def is_of_user(function: Any) -> bool:
    """Whether a processor or criterion, or a function that it calls, is not of transformers."""
    calls_own = isinstance(function, PrefixConstrainedLogitsProcessor)
    return calls_own or not type(function).__module__.startswith("transformers.")


def describe_state(function: Any) -> dict[str, Any]:
    """What a function holds, by name; equal as long as nothing changes."""
    budget = _Budget(MAX_VALUES)
    return {name: budget.describe(value, DEPTH) for name, value in _read_state(function).items()}


class _Budget:
    """The values that may still be looked at."""

    def __init__(self, left: int) -> None:
        self.left = left

    def describe(self, value: Any, depth: int) -> Any:
        self.left -= 1
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, float):
            return repr(value)  # NaN differs from itself
        if isinstance(value, Tensor):
            return id(value), None if value.is_inference() else value._version
        if isinstance(value, np.ndarray):
            return id(value), value.tobytes() if value.nbytes <= MAX_BYTES else None
        if isinstance(value, Mapping):
            return len(value), self._describe_all(value.items(), depth)
        if isinstance(value, list | tuple | set | frozenset | deque):
            return len(value), self._describe_all(value, depth)
        if isinstance(value, nn.Module | type(torch)):
            return id(value)
        return id(value), self._describe_all(_read_state(value).items(), depth)

    def _describe_all(self, values: Iterable[Any], depth: int) -> list[Any]:
        found: list[Any] = []
        if depth:
            for value in values:
                if self.left <= 0:
                    break
                found.append(self.describe(value, depth - 1))
        return found


def _read_state(function: Any) -> Mapping[str, Any]:
    """The attributes of an object, or what a function holds."""
    if isinstance(function, partial):
        return {"func": function.func, "args": function.args, "keywords": function.keywords}
    if inspect.ismethod(function):
        return {"self": function.__self__}
    if not inspect.isfunction(function):
        return vars(function) if hasattr(function, "__dict__") else {}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    captured = {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}
    return {**captured, "defaults": function.__defaults__, **vars(function)}


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


class StatefulProcessor(LogitsProcessor, ABC):
    """A logits processor that declares its state.

    States are never changed: `advance` returns another one. Draft distributions are processed as
    well, where `masks_drafts` holds: more drafts are then accepted, and an accelerator is read once
    for every level of a draft instead of once a round.
    """

    masks_drafts: bool = True

    @abstractmethod
    def begin(self, row: int, prompt: Sequence[int]) -> Any:
        """The state before the first new token of a row; `prompt` has its padding."""

    @abstractmethod
    def advance(self, state: Any, token: int) -> Any:
        """The state after one more token; None if the token must not follow."""

    @abstractmethod
    def apply(self, states: Sequence[Any], scores: Tensor) -> Tensor:
        """Process scores (n, V) of n positions with their states; None leaves its scores as is."""

    def explain(self, state: Any, token: int) -> str:
        """Why a committed token must not follow."""
        return f"token {token} must not follow"

    def __call__(self, input_ids: Any, scores: Any) -> NoReturn:
        """Raises ValueError: `generate()` of transformers does not follow states."""
        raise ValueError(
            f"{type(self).__name__} declares its state, which model.generate() does not follow; "
            "call fast.generate(), pass custom_generate=fast, or wrap it for one call of "
            "model.generate(): StepwiseProcessor(processor)"
        )


class RequestProcessor(ABC):
    """What makes the stateful processor of each request, such as a `Grammar`."""

    @abstractmethod
    def bind(
        self, rows: Sequence[Any], size: int, eos: frozenset[int], tokenizer: Any
    ) -> StatefulProcessor:
        """The processor of a request whose rows have these makers, None = none.

        `size` is the width of the model's logits, `eos` are the tokens that end a row.
        """


def spread_rows(given: Any, batch: int) -> Sequence[RequestProcessor | None]:
    """A grammar per row, from one for all rows or a list. Raises ValueError for anything else."""
    rows = [given] * batch if isinstance(given, RequestProcessor) else given
    is_list = isinstance(rows, list | tuple)
    if not is_list or not all(one is None or isinstance(one, RequestProcessor) for one in rows):
        raise ValueError(
            f"grammar={format_value(given)} is no Grammar; make one with "
            "mmspec.Grammar.json_schema(...), .regex(...) or .ebnf(...)"
        )
    if len(rows) != batch:
        raise ValueError(
            f"grammar= has {len(rows)} grammars for {batch} rows; give one for all, or one (or "
            "None) for each"
        )
    found: Sequence[RequestProcessor | None] = rows
    return found


class StepwiseProcessor(LogitsProcessor):
    """A stateful processor for plain decoding: one call of `model.generate()` without beams."""

    def __init__(self, processor: StatefulProcessor) -> None:
        self.processor = processor
        self.states: list[Any] | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # (B, L), (B, V) -> (B, V)
        rows = input_ids.tolist()
        if self.states is None:
            self.states = [self.processor.begin(row, ids) for row, ids in enumerate(rows)]
        else:
            pairs = zip(self.states, rows, strict=True)
            self.states = [
                None if state is None else self.processor.advance(state, ids[-1])
                for state, ids in pairs
            ]
        return self.processor.apply(self.states, scores)


@dataclass
class _Branch:
    state: Any
    children: dict[int, _Branch] = field(default_factory=dict)


class StateTree:
    """The states of one row: after its committed tokens, and along drafted paths."""

    def __init__(self, processor: StatefulProcessor, row: int, prompt: Sequence[int]) -> None:
        self.processor = processor
        self.start = _Branch(processor.begin(row, prompt))
        self.root, self.count = self.start, 0  # committed tokens

    def find(self, committed: Sequence[int], drafted: Sequence[int]) -> Any:
        """The state after the committed and drafted tokens; None where these must not follow."""
        if len(committed) < self.count:  # of another run of the same request
            self.root, self.count = _Branch(self.start.state), 0
        self.commit(committed[self.count :])
        branch = self.root
        for token in drafted:
            branch = self._step(branch, token)
        return branch.state

    def commit(self, tokens: Sequence[int]) -> None:
        """Move the root. Raises ValueError for a token that must not follow."""
        for token in tokens:
            child = self._step(self.root, token)
            if child.state is None and self.root.state is not None:
                raise ValueError(self.processor.explain(self.root.state, token))
            self.root = child
        self.count += len(tokens)

    def _step(self, branch: _Branch, token: int) -> _Branch:
        child = branch.children.get(token)
        if child is None:
            state = None if branch.state is None else self.processor.advance(branch.state, token)
            child = branch.children[token] = _Branch(state)
        return child


class StateTrees:
    """The trees of a request: one for every processor and row, made when first used."""

    def __init__(self) -> None:
        self.trees: dict[tuple[int, int], StateTree] = {}

    def process(
        self, processor: StatefulProcessor, flat: Tensor, prefix: NodePrefix, nodes: int
    ) -> Tensor:  # (B * M, V)
        """Process the scores of M nodes of every row."""
        states = []
        for row, generated in enumerate(prefix.generated):
            tree = self._tree(processor, row, prefix)
            states += [tree.find(generated, prefix.drafted(row, node)) for node in range(nodes)]
        return processor.apply(states, flat)

    def commit(self, row: int, before: int, tokens: Sequence[int]) -> None:
        """Check new tokens of a row, which follow `before` others, before they are committed.

        Raises ValueError for one that a processor does not let follow.
        """
        for (_, own), tree in self.trees.items():
            if own == row and tree.count == before:
                tree.commit(tokens)

    def _tree(self, processor: StatefulProcessor, row: int, prefix: NodePrefix) -> StateTree:
        key = (id(processor), row)
        if key not in self.trees:
            self.trees[key] = StateTree(processor, row, prefix.prompt(row))
        return self.trees[key]


def keep_possible(scores: Tensor, logits: Tensor) -> Tensor:  # (B, n, V), (B, n, V) or narrower
    """Draft scores; the unprocessed ones where a draft model has no token that may follow.

    Whatever it then proposes is rejected: the target gives it probability 0.
    """
    is_empty = scores.amax(-1, keepdim=True) == -torch.inf
    return torch.where(is_empty, logits.to(scores.dtype), scores)


@dataclass(frozen=True)
class Group:
    """One call of a prefix-dependent processor."""

    ids: Tensor  # (R, L) prefixes of equal length
    nodes: Tensor  # (R,) flat indices of their scores
    keep: Tensor | None  # which of the R results are used; None = all


def group_nodes(paths: list[Tensor], batch: int, row_bound: bool) -> list[Group]:
    """Group the B * M nodes, row by row, into calls of equal prefix length.

    A processor that depends on the row index (a prompt length per row, a batch index) must get row
    b at index b. A call then has one node of every row; rows of another prefix length are fillers
    (cut if longer) whose results are discarded.
    """
    everything = range(len(paths))
    count = len(paths) // batch
    sets = [everything[node::count] for node in range(count)] if row_bound else [everything]
    groups = []
    for members in sets:
        for length in sorted({len(paths[i]) for i in members}):
            same = [i for i in members if len(paths[i]) == length]
            called = list(members) if row_bound else same
            ids = torch.stack(
                [paths[i if len(paths[i]) >= length else same[0]][:length] for i in called]
            )
            keep = None
            if len(same) < len(called):
                keep = torch.tensor([called.index(i) for i in same], device=ids.device)
            groups.append(Group(ids, torch.tensor(called, device=ids.device), keep))
    return groups


def run_grouped(processor: LogitsProcessor, flat: Tensor, groups: list[Group]) -> Tensor:
    out = torch.empty_like(flat)
    for group in groups:
        # indexing copies, so processors may write in place
        result = processor(group.ids, flat[group.nodes])
        if group.keep is None:
            out[group.nodes] = result
        else:
            out[group.nodes[group.keep]] = result[group.keep]
    return out
