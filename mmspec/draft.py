"""Data exchanged within one decoding round, and the interfaces of its parts.

Letters: B batch rows, N draft nodes, D longest path, V vocabulary, E event shape of a continuous
token. A draft is a forest per row: the parent of a node is an earlier node or the context. A chain
is a tree.

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

from mmspec._attributes import default_property
from mmspec.distributions.categorical import Categorical
from mmspec.errors import check_no_draft, raise_no_picture
from mmspec.trees import Tree, all_true_mask, compute_children, compute_reach, expand_rows

if TYPE_CHECKING:
    from mmspec.distributions import Distribution
    from mmspec.distributions.noise import Noise


class Kind(Enum):
    """How the children of one node were sampled; verifiers are exact for the kinds they list."""

    IID = "iid"  # each child sampled independently from q, duplicates possible
    WOR = "wor"  # sampled one after the other from q without replacement
    DET = "det"  # chosen by looking at identities: top-k, retrieval, re-ranking
    HUB = "hub"  # the top k-1 tokens of q, then one sample from the rest of q
    RACE = "race"  # argmax (top-k) of log q + g, with the target's own Gumbel noise g


@dataclass(frozen=True)
class NodeInputs:
    """Target inputs of the draft nodes, where these are not tokens at their depths."""

    relative_positions: Tensor | None = None  # (B, N) distance from the context; None = depths
    embeds: Tensor | None = None  # (B, N, D) input embeddings; None = those of the tokens


@dataclass(frozen=True)
class Draft:
    """A forest of proposals, one tree per row.

    `distribution` row i is the drafter's distribution at the parent of node i, before any sibling
    was removed: siblings have equal rows. None means that the verifier does not need it (DET and
    RACE proposals). `tree` is set when every row has the same topology; then `parents` repeats it.

    A node outside the mask is read and scored like any other, but cannot be accepted: padding, a
    position that holds noise, or a token after a gap (`NodeInputs.relative_positions`).
    """

    tokens: Tensor  # (B, N) int64, or events (B, N, *E), such as frames; parents before children
    parents: Tensor  # (B, N) int64 node index, -1 = the context
    mask: Tensor  # (B, N) bool, False = no proposal, nor are its descendants
    kind: Kind
    distribution: Distribution | None = None  # batch shape (B, N)
    tree: Tree | None = None  # the shared topology, when there is one
    padded: bool = True  # whether `mask` may hide anything; False skips reading it
    node_inputs: NodeInputs | None = None  # None = tokens at their depths
    extras: object = None  # data of some verifiers: `distributions.DrivingNoise`, `islands.Cells`
    max_depth: int | None = None  # no path is longer, where rows differ; None = read from `parents`
    read_order: Tensor | None = None  # (B, N) when the drafter read each node, -1 = not; `Round`'s

    @classmethod
    def chain(
        cls,
        tokens: Tensor,
        kind: Kind,
        distribution: Distribution | None = None,
        mask: Tensor | None = None,
    ) -> Draft:
        """Wrap proposals (B, N) that follow each other."""
        return cls.from_tree(Tree.chain(tokens.shape[1]), tokens, kind, distribution, mask)

    @classmethod
    def from_tree(
        cls,
        tree: Tree,
        tokens: Tensor,
        kind: Kind,
        distribution: Distribution | None = None,
        mask: Tensor | None = None,
        extras: object = None,
    ) -> Draft:
        """Wrap proposals (B, N) laid out as `tree`."""
        real = all_true_mask(*tokens.shape[:2], tokens.device) if mask is None else mask
        parents = expand_rows(tree.parents_on(tokens.device), len(tokens))
        return cls(tokens, parents, real, kind, distribution, tree, mask is not None, extras=extras)

    @classmethod
    def empty(
        cls,
        batch: int,
        device: torch.device,
        dtype: torch.dtype = torch.int64,
        event: Sequence[int] = (),
    ) -> Draft:
        """A draft without nodes: the round then yields one token of the target."""
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

    def depths(self) -> Tensor:  # (B, N), 0 = child of the context
        """Distance of every node from the context."""
        return expand_rows(self.scored_depths[:, 1:] - 1, self.batch)

    def relative_positions(self) -> Tensor:  # (B, N), 0 = the first position after the context
        """Position of every node relative to the context: its depth, unless there are gaps."""
        ahead = None if self.node_inputs is None else self.node_inputs.relative_positions
        return self.depths() if ahead is None else ahead

    def ancestors(self) -> Tensor:  # (B, N, N) bool, [b, i, j]: j is i or an ancestor of i
        """Which nodes each node may attend to: itself and the path above it."""
        if self.tree is not None:
            return self.tree.ancestors_on(self.tokens.device).expand(self.batch, -1, -1)
        return self.reach[:, 1:].bool()

    def children(self) -> Tensor:  # (B, N + 1, C) node index, -1 padded; row 0 = of the context
        """Child indices of each node, in the order of sampling."""
        if self.tree is not None:
            return self.tree.children_on(self.tokens.device).expand(self.batch, -1, -1)
        return self._kids

    @cached_property
    def scored_depths(self) -> Tensor:  # (1 or B, N + 1)
        """Distance from the context of what each row of `Scores` predicts."""
        tree, on = self.tree, self.tokens.device
        return self.reach.sum(-1, dtype=torch.int64) if tree is None else tree.scored_depths_on(on)

    @cached_property
    def reach(self) -> Tensor:  # (B, N + 1, N) float
        """1 where a node is on the path that ends at the context (row 0) or at a node; else 0."""
        return compute_reach(self.parents, self.max_depth)

    @cached_property
    def _kids(self) -> Tensor:  # (B, N + 1, C): `children`; reads the largest number of children
        return compute_children(self.parents)


@dataclass(frozen=True)
class Scores:
    """The target's scores of a draft.

    `distribution` is p with batch shape (B, N + 1): row 0 follows the context, row i + 1 node i.
    """

    distribution: Distribution
    position: Tensor  # (B, N + 1) absolute position of the token that each row predicts
    features: Mapping[str, Tensor] = field(default_factory=dict)  # (B, N + 1, ...) as requested
    calls: int = 1  # forward passes
    lengths: tuple[int, ...] | None = None  # position of row 0, where the host knows it


@dataclass(frozen=True)
class Verdict:
    """The verifier's decision."""

    path: Tensor  # (B, D) node indices from the context downwards, -1 padded
    length: Tensor  # (B,) accepted draft tokens
    next: Tensor | None  # (B,) or (B, *E): one more token of the target; None = not scored yet
    excess: Tensor | None = None  # (B,) over-accepted mass of the tests made; None = not measured
    replacements: Tensor | None = None  # (B, N, *E) output in place of the tokens; None = those
    resample_mask: Tensor | None = None  # (B, N) bool: nodes to resample; None = those off the path


@dataclass(frozen=True)
class Round:
    """One iteration of the loop, on the host: accepted tokens, cost, and the `partial()` output.

    `path[b]` are the draft nodes accepted in row b; `takes_next[b]` is whether the target's own
    token was taken as well (not where a stop condition ended the row before it).
    """

    index: int  # 0 = the round that takes the first token from the prefill
    drafted: tuple[int, ...]  # proposed nodes per row
    accepted: tuple[int, ...]  # draft nodes accepted per row: the length of its path
    path: tuple[tuple[int, ...], ...]
    takes_next: tuple[bool, ...]
    tokens: tuple[tuple[Any, ...], ...]  # new verified tokens per row: path tokens, then the next
    finished: tuple[bool, ...]
    verdict: Verdict
    depth: int = 0  # longest path proposed
    read: tuple[tuple[int, ...], ...] | None = None  # `Draft.read_order` of the accepted nodes
    calls: int = 1  # target forwards: none in round 0 (the prefill), nor where a gate skipped it
    seconds: Mapping[str, float] = field(default_factory=dict)  # prefill, draft, verify, host
    fallback: str | None = None  # why the drafter was disabled in this round
    excess: tuple[float, ...] | None = None  # over-accepted mass per row; None = not measured
    partial: Callable[[], Any] = field(default=raise_no_picture, repr=False, compare=False)

    @property
    def is_unverified(self) -> bool:  # whether a gate accepted these tokens without the target
        return self.verdict.next is None


class Target(Protocol):
    """Scores drafts with the target model; `Any` is its own type of request and context."""

    def prefill(self, request: Any) -> Any: ...
    def score(self, context: Any, draft: Draft) -> Scores: ...  # one forward: pending + draft
    def keep(self, context: Any, draft: Draft, round_: Round) -> Any: ...  # commit the path


class Drafter(ABC):
    """Proposes drafts and observes their verdicts.

    All but `kinds` and `propose` have a default; `token_probs` is for drafts without distributions.
    """

    @property
    @abstractmethod
    def kinds(self) -> tuple[Kind, ...]: ...  # that it can sample, preferred first

    @default_property
    def sees(self) -> str:
        """What of the image it is conditioned on."""
        return "nothing"

    @default_property
    def required_features(self) -> frozenset[str]:
        """Features that the target must provide: "vision", "attention", "hidden"."""
        return frozenset()

    @default_property
    def reads_prompt(self) -> bool:
        """Whether it reads the tokens of the prompt itself and cannot work without them."""
        return False

    @default_property
    def uses_trees(self) -> bool:
        """Whether it may propose anything but chains."""
        return False

    @default_property
    def carries_tokens(self) -> bool:
        """Whether tokens of a draft are carried over to the next one."""
        return False

    @default_property
    def drafts_first_token(self) -> bool:
        """Whether it proposes the first token too; the prompt is then read with its draft."""
        return False

    @default_property
    def deferred_features(self) -> frozenset[str]:
        """What of `required_features` not needed before its first proposal was scored."""
        return frozenset()

    @default_property
    def records_distribution(self) -> bool:
        """Whether drafts include the distributions that their tokens were sampled from."""
        return True

    def with_kind(self, kind: Kind) -> Drafter:  # the same, restricted to that kind
        return self

    def prepare_inputs(self, inputs: Mapping[str, Any], batch: int) -> Mapping[str, Any]:
        """Prepare the `drafter_inputs` of a call. Raises ValueError for a draft it would ignore."""
        return check_no_draft(inputs, self)

    def begin(self, context: Any) -> Any:  # the state of a request
        return None

    def cache_bytes(self, state: Any) -> int | None:
        """Bytes of its own keys and values; None = not known."""
        return None

    def token_probs(self, state: Any, draft: Draft) -> Tensor | None:  # (B, N) q, for traces
        return None

    @abstractmethod
    def propose(self, context: Any, state: Any) -> Draft: ...

    def observe(self, context: Any, state: Any, draft: Draft, scores: Scores, round_: Round) -> Any:
        return state  # the state after a round


class Verifier(ABC):
    """Turns a draft and its scores into a verdict."""

    @property
    @abstractmethod
    def lossless(self) -> bool:
        """Whether the output distribution is the target's."""

    @property
    @abstractmethod
    def kinds(self) -> tuple[Kind, ...]:
        """The proposal kinds it is correct for, preferred first."""

    @default_property
    def rule(self) -> Rule | RuleSchedule | None:
        """The acceptance rule of single tokens, if it has one."""
        return None

    @default_property
    def uses_trees(self) -> bool:
        """Whether it verifies anything but chains."""
        return True

    @default_property
    def decodes(self) -> tuple[str, ...]:
        """What it verifies, as in `Modality.decodes`; empty = not restricted."""
        return ()

    @default_property
    def looks_ahead(self) -> bool:
        """Whether the acceptance of a token depends on later tokens."""
        return False

    @default_property
    def is_blind(self) -> bool:
        """Whether the target scores drafted tokens without reading the drafted tokens before."""
        return False

    @default_property
    def needs_random_steps(self) -> bool:
        """Whether every step of a drafted path must add noise."""
        return False

    @default_property
    def couples(self) -> bool:
        """Whether its output is that of plain decoding with the same seed."""
        return False

    @default_property
    def required_features(self) -> frozenset[str]:
        """Features that the target must provide, with the scores or after the prefill."""
        return frozenset()

    @default_property
    def description(self) -> str:
        """Its walk and its rule, as displayed."""
        return type(self).__name__ + ("" if self.rule is None else f", {self.rule!r}")

    def bind_context(self, context: Any) -> Verifier:
        """The verifier of this round; those that depend on position or history override it."""
        return self

    @abstractmethod
    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict: ...


class Rule(Protocol):
    """Acceptance rule on distributions of batch shape (...); knows no trees, caches, models.

    Under greedy decoding `p` is a point mass, whose `scores` still rank the other tokens. A rule
    that uses ranks returns `p` or `p.residual(q)`, which keep them for the next sibling.
    """

    @property
    def lossless(self) -> bool: ...

    def accept(self, p: Categorical, q: Categorical, x: Tensor) -> Tensor: ...  # (...) in [0, 1]
    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical: ...


@runtime_checkable
class RuleSchedule(Protocol):
    """One rule per depth of a draft."""

    @property
    def lossless(self) -> bool: ...

    def at(self, depth: Tensor | int, longest: int) -> Rule: ...  # depth 0 = first; broadcasts to x


class Gate(ABC):
    """May accept a draft without the target; its tokens then stay pending."""

    @default_property
    def description(self) -> str:
        """What it decides by, as displayed."""
        return repr(self)

    @abstractmethod
    def skip(self, context: Any, draft: Draft) -> Verdict | None: ...  # `next` is None in it
