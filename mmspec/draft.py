"""What travels between the parts of one decoding round, and the parts themselves.

Letters: B batch rows, N draft nodes, D longest path, V vocabulary, E event shape of a continuous
token. A draft is a forest per row: nodes hang from earlier ones or the context. A chain is a tree.

    context  the cat           node      0    1    2    3
                |  \\           token    sat  ran  on   off
               sat  ran        parent   -1   -1    0    0
              /   \\            depth     0    0    1    1
             on   off
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from mmspec.declared import declared
from mmspec.distributions.categorical import Categorical
from mmspec.errors import nothing_drawn, without_draft
from mmspec.trees import Tree, all_real, children_of, reach_of

if TYPE_CHECKING:
    from mmspec.distributions.distribution import Distribution
    from mmspec.distributions.noise import Noise


class Kind(Enum):
    """How the children of one node were drawn; verifiers are exact only for the kinds they name."""

    IID = "iid"  # each child drawn independently from q, duplicates possible
    WOR = "wor"  # drawn one after the other from q without replacement
    DET = "det"  # chosen by looking at identities: top-k, retrieval, re-ranking
    HUB = "hub"  # the top k-1 tokens of q, then one draw from the rest of q
    RACE = "race"  # argmax (top-k) of log q + g, with the target's own Gumbel noise g


@dataclass(frozen=True)
class Reading:
    """How the target reads the nodes of a draft, where that is not as tokens at their depths."""

    ahead: Tensor | None = None  # (B, N) places behind the context; None = the depths
    embeds: Tensor | None = None  # (B, N, D) what it reads; None = the tokens


@dataclass(frozen=True)
class Draft:
    """A forest of proposals, one tree per row.

    `distribution` row i is the drafter's distribution at the parent of node i, before any sibling
    was removed: siblings share a row's content. None means the verifier has no use for it (DET and
    RACE proposals). `tree` is set when every row has the same topology; then `parents` repeats it.

    A node off the mask is read and spoken about like any other, but is no proposal: it cannot be
    kept. That is padding, a place that holds noise, or a token behind a gap (`Reading.ahead`).
    """

    tokens: Tensor  # (B, N) int64, or events (B, N, *E), such as frames; parents before children
    parents: Tensor  # (B, N) int64 node index, -1 = hangs from the context
    mask: Tensor  # (B, N) bool, False = no proposal; then its descendants are none either
    kind: Kind
    distribution: Distribution | None = None  # batch shape (B, N)
    tree: Tree | None = None  # the shared topology, when there is one
    padded: bool = True  # whether `mask` may hide anything; False spares looking at it
    reading: Reading | None = None  # None = tokens at their depths
    extras: object = (
        None  # what some verifiers ask for besides: `distributions.Driving`, `islands.Cells`
    )

    @classmethod
    def chain(
        cls,
        tokens: Tensor,
        kind: Kind,
        distribution: Distribution | None = None,
        mask: Tensor | None = None,
    ) -> Draft:
        """Wrap proposals (B, N) that follow each other."""
        return cls.of(Tree.chain(tokens.shape[1]), tokens, kind, distribution, mask)

    @classmethod
    def of(
        cls,
        tree: Tree,
        tokens: Tensor,
        kind: Kind,
        distribution: Distribution | None = None,
        mask: Tensor | None = None,
        extras: object = None,
    ) -> Draft:
        """Wrap proposals (B, N) laid out as `tree`."""
        real = all_real(tokens.shape[0], tokens.shape[1], tokens.device) if mask is None else mask
        parents = tree.parents_on(tokens.device).expand(tokens.shape[0], -1)
        return cls(tokens, parents, real, kind, distribution, tree, mask is not None, extras=extras)

    @classmethod
    def empty(
        cls,
        batch: int,
        device: torch.device,
        dtype: torch.dtype = torch.int64,
        event: Sequence[int] = (),
    ) -> Draft:
        """Propose nothing: the round then yields one token of the target."""
        return cls.chain(torch.zeros(batch, 0, *event, dtype=dtype, device=device), Kind.DET)

    @property
    def batch(self) -> int:
        return self.tokens.shape[0]

    @property
    def nodes(self) -> int:
        return self.tokens.shape[1]

    @property
    def is_chain(self) -> bool:
        return self.tree is not None and self.tree.is_chain

    def depths(self) -> Tensor:  # (B, N), 0 = hangs from the context
        """Distance of every node from the context."""
        if self.tree is not None:
            return self.tree.depths_on(self.tokens.device).expand(self.batch, -1)
        return self._reach.sum(-1) - 1

    def places(self) -> Tensor:  # (B, N), 0 = right behind the context
        """Where every node stands in the text: at its depth, unless there are gaps."""
        ahead = None if self.reading is None else self.reading.ahead
        return self.depths() if ahead is None else ahead

    def ancestors(self) -> Tensor:  # (B, N, N) bool, [b, i, j]: j is i or an ancestor of i
        """Which nodes each node may attend to: itself and the path above it."""
        if self.tree is not None:
            return self.tree.ancestors_on(self.tokens.device).expand(self.batch, -1, -1)
        return self._reach

    def children(self) -> Tensor:  # (B, N + 1, C) node index, -1 padded; row 0 = of the context
        """The proposals below each node, in the order they were drawn."""
        if self.tree is not None:
            return self.tree.children_on(self.tokens.device).expand(self.batch, -1, -1)
        return self._kids

    @cached_property
    def _reach(self) -> Tensor:  # (B, N, N) bool: `ancestors` of rows that differ
        return reach_of(self.parents)

    @cached_property
    def _kids(self) -> Tensor:  # (B, N + 1, C): `children`; asks the device for the widest family
        return children_of(self.parents)


@dataclass(frozen=True)
class Scores:
    """What the target says about a draft."""

    distribution: Distribution  # target distribution p, batch shape (B, N + 1): row 0 follows the context, row i + 1 node i
    position: (
        Tensor  # (B, N + 1) absolute position of the token that each distribution row speaks of
    )
    features: Mapping[str, Tensor] = field(default_factory=dict)  # (B, N + 1, ...) as asked for
    calls: int = 1  # forwards it took


@dataclass(frozen=True)
class Verdict:
    """What the verifier decided."""

    path: Tensor  # (B, D) node indices from the context downwards, -1 padded
    length: Tensor  # (B,) accepted draft tokens
    next: Tensor | None  # (B,) or (B, *E): one more token of the target; None = not scored yet
    excess: Tensor | None = None  # (B,) over-accepted mass of the tests made; None = not measured
    replaced: Tensor | None = None  # (B, N, *E) what is said in place of the tokens; None = those
    failed: Tensor | None = None  # (B, N) bool: nodes to be drawn anew; None = those off the path


@dataclass(frozen=True)
class Round:
    """One turn of the loop, on the host: what was kept of the verdict, and what it cost.

    `path[b]` are the draft nodes kept in row b; `takes_next[b]` says whether the target's own token
    was kept as well (it is not where a stop condition cut the row before it).
    """

    index: int  # 0 = the round that reads the first token off the prefill
    drafted: tuple[int, ...]  # proposed nodes per row
    accepted: tuple[int, ...]  # draft nodes kept per row: the length of its path
    path: tuple[tuple[int, ...], ...]
    takes_next: tuple[bool, ...]
    tokens: tuple[tuple[Any, ...], ...]  # new verified tokens per row: path tokens, then the next
    finished: tuple[bool, ...]
    verdict: Verdict
    depth: int = 0  # longest path proposed
    calls: int = 1  # target forwards: none in round 0 (the prefill), nor where a gate skipped it
    seconds: Mapping[str, float] = field(default_factory=dict)  # prefill, draft, verify, host
    fallback: str | None = None  # why the drafter was retired in this round
    excess: tuple[float, ...] | None = None  # over-accepted mass per row; None = not measured
    partial: Callable[[], Any] = field(default=nothing_drawn, repr=False, compare=False)  # picture

    @property
    def skips(self) -> bool:  # whether a gate kept these tokens without asking the target
        return self.verdict.next is None


class Target(Protocol):
    """The only thing that knows a model family; `Any` is its own kind of request and context."""

    def prefill(self, request: Any) -> Any: ...
    def score(self, context: Any, draft: Draft) -> Scores: ...  # one forward: pending + draft
    def keep(self, context: Any, draft: Draft, kept: Round) -> Any: ...  # commit the path


class Drafter(ABC):
    """Proposes, and learns from what became of the proposals.

    What follows `kinds` has a default, and whoever differs says so; nobody probes for it. One that
    remembers nothing of a request only proposes.
    """

    @property
    @abstractmethod
    def kinds(self) -> tuple[Kind, ...]: ...  # that it can draw, preferred first

    @declared
    def sees(self) -> str:
        """What it sees of the picture."""
        return "nothing"

    @declared
    def wants(self) -> frozenset[str]:
        """What the target shall offer: "vision", "attention", "hidden"."""
        return frozenset()

    @declared
    def reads(self) -> bool:
        """Whether it reads the prompt's tokens by itself, and is lost without them."""
        return False

    @declared
    def trees(self) -> bool:
        """Whether it may propose anything but chains."""
        return False

    @declared
    def carries(self) -> bool:
        """Whether tokens of a draft are carried over to the next one."""
        return False

    @declared
    def opens(self) -> bool:
        """Whether it proposes the first token, too: a prompt is read with its draft, or never."""
        return False

    @declared
    def awaits(self) -> frozenset[str]:
        """What of `wants` it does not look at before its first proposal was scored."""
        return frozenset()

    @declared
    def records_distribution(self) -> bool:
        """Whether drafts carry the distributions that their tokens were drawn from."""
        return True

    def drawing(self, kind: Kind) -> Drafter:  # the same, drawing that kind only
        return self

    def given(self, inputs: Mapping[str, Any], batch: int) -> Mapping[str, Any]:
        """`drafter_inputs` of a call as it keeps them. Raises ValueError for a draft it ignores."""
        return without_draft(inputs, self)

    def begin(self, context: Any) -> Any:  # what is remembered of a request
        return None

    def holds(self, state: Any) -> int | None:
        """Bytes of the keys and values that it keeps for itself; None = it does not say."""
        return None

    @abstractmethod
    def propose(self, context: Any, state: Any) -> Draft: ...

    def observe(self, context: Any, state: Any, draft: Draft, scores: Scores, kept: Round) -> Any:
        return state  # what is remembered after a round


class Verifier(ABC):
    """Turns a draft and its scores into a verdict. Defaults are declared as those of `Drafter`."""

    @property
    @abstractmethod
    def lossless(self) -> bool:
        """Whether the output distribution is the target's; a walk is as lossless as its rule."""

    @property
    @abstractmethod
    def kinds(self) -> tuple[Kind, ...]:
        """The proposal kinds it is right for, preferred first."""

    @declared
    def rule(self) -> Rule | RuleSchedule | None:
        """What it asks about a single token, if that is how it decides."""
        return None

    @declared
    def trees(self) -> bool:
        """Whether it takes anything but chains."""
        return True

    @declared
    def looks_ahead(self) -> bool:
        """Whether a token's fate depends on the tokens behind it."""
        return False

    @declared
    def blind(self) -> bool:
        """Whether the target scores drafted tokens without having read those before them."""
        return False

    @declared
    def random(self) -> bool:
        """Whether every step of a drafted path must add noise."""
        return False

    @declared
    def couples(self) -> bool:
        """Whether its output is that of plain decoding with the same seed."""
        return False

    @declared
    def wants(self) -> frozenset[str]:
        """What the target shall offer, as for a `Drafter`, with the scores or after the prefill."""
        return frozenset()

    @declared
    def words(self) -> str:
        """Its walk and its rule, for people."""
        return type(self).__name__ + ("" if self.rule is None else f", {self.rule!r}")

    def within(self, context: Any) -> Verifier:
        """The same for this round; whoever goes by place or history says what it is here."""
        return self

    @abstractmethod
    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict: ...


class Rule(Protocol):
    """Acceptance maths on distributions of batch shape (...); knows no trees, caches, models.

    Under greedy decoding `p` is a point mass, whose `scores` still rank the other tokens. A rule
    that asks for ranks returns `p` or `p.residual(q)`, so that they are there for the next sibling.
    """

    @property
    def lossless(self) -> bool: ...

    def accept(self, p: Categorical, q: Categorical, x: Tensor) -> Tensor: ...  # (...) in [0, 1]
    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical: ...


@runtime_checkable
class RuleSchedule(Protocol):
    """A rule for every depth of a draft; a walk tests each level with its own."""

    @property
    def lossless(self) -> bool: ...

    def at(self, depth: Tensor | int, longest: int) -> Rule: ...  # depth 0 = first; broadcasts to x


class Gate(ABC):
    """May accept a draft without asking the target; its tokens then wait to be scored (pending)."""

    @declared
    def words(self) -> str:
        """What it looks at, for people."""
        return repr(self)

    @abstractmethod
    def skip(self, context: Any, draft: Draft) -> Verdict | None: ...  # `next` is None in it


def categorical(distribution: Distribution | None) -> Categorical:
    """Narrow a distribution to a categorical one; rules over a vocabulary know no other."""
    if not isinstance(distribution, Categorical):
        raise TypeError(
            f"a categorical distribution is needed here, but the distribution is {type(distribution).__name__}"
        )
    return distribution
