"""Autoregressive draft models: the interface, and the data passed to and from one.

`predict_first` reads the committed tokens that were not read yet and returns the distribution of
the next token; `predict` reads draft nodes and returns one distribution per node. A draft model may
cache what it read of accepted tokens. A `Shape` decides which nodes it reads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmspec._attributes import default_property, delegate_to
from mmspec.distributions.call_state import keep_possible
from mmspec.distributions.categorical import Categorical, probs_of_tokens
from mmspec.distributions.sampling import Prefix
from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.drafters.trees.draws import draw
from mmspec.targets.memory import BlockSeries, TokenBlock, build_block
from mmspec.targets.tokens.context import Context, prefix_of
from mmspec.trees import paths_of_visible


class DraftModel(ABC):
    """An autoregressive source of draft distributions."""

    @property
    @abstractmethod
    def sees(self) -> str:
        """What it sees of the image."""

    @default_property
    def required_features(self) -> frozenset[str]:
        """Features that the target must provide, as for a `Drafter`."""
        return frozenset()

    @default_property
    def reads_prompt(self) -> bool:
        """Whether it needs the token ids of the prompt, as for a `Drafter`."""
        return False

    @default_property
    def max_depth_ahead(self) -> int | None:
        """How many tokens after the committed ones it can predict; None = any number."""
        return None

    @default_property
    def is_parallel(self) -> bool:
        """Whether nodes of one depth share their distribution, independent of their prefix."""
        return False

    @default_property
    def input_names(self) -> frozenset[str]:
        """Names of `drafter_inputs` that it takes beside those of its model."""
        return frozenset()

    def prepare_inputs(self, inputs: Mapping[str, Any], batch: int) -> Mapping[str, Any]:
        """Prepare the `drafter_inputs` of a call. Raises ValueError for what it cannot read."""
        return inputs

    def begin(self, context: Context) -> Any:
        """Create the state of a request."""
        return None

    @abstractmethod
    def predict_first(
        self, context: Context, state: Any
    ) -> Categorical: ...  # (B, 1), distribution of the token after the context
    @abstractmethod
    def predict(self, context: Context, state: Any, nodes: DraftNodes) -> Categorical: ...  # (B, n)

    def keep(self, context: Context, state: Any, update: DraftUpdate) -> Any:
        """Return the state after a round."""
        return state

    def compile_blocks(self, make_graphs: Callable[..., Any]) -> str:
        """Read by compiled graphs from now on; returns why it cannot, "" where it does.

        `make_graphs` makes `mmspec.targets.readers.compiled.BlockGraphs` of a function that makes
        theirs, and one that lists the modules it runs.
        """
        return "its forwards are not written as functions of padded blocks"

    def graph_steps(self) -> GraphSteps | None:
        """Its forwards as functions of tensors alone, for a draft grown by one graph; or None."""
        return None

    def first_block(self, context: Context, state: Any) -> FirstBlock | None:
        """What `predict_first` reads in this round, not read yet; None = not by a graph."""
        return None

    def cache_bytes(self, state: Any) -> int | None:
        """Bytes of cached keys and values, as for a `Drafter`; None = unknown."""
        return None


@dataclass(frozen=True)
class GraphSteps:
    """The forwards of a draft model as functions of tensors alone; R rows.

    `make_step` makes a function of padded blocks, as `blocks` has them, the
    `mmspec.targets.readers.compiled.BlockGraphs` of single forwards. `predict` gives logits (R, n,
    V') of its results, and `feed` the further inputs of a block of draft nodes: from the last
    result of all blocks so far (R, m, D) each, the index of every node's parent there (R, n), the
    nodes' depths, and the further inputs of the first block.
    """

    blocks: Any
    make_step: Callable[[], Callable[..., Sequence[Tensor]]]
    predict: Callable[[Sequence[Tensor]], Tensor]
    feed: Callable[[Sequence[Tensor], Tensor, Tensor, Sequence[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class FirstBlock:
    """The committed tokens that a draft model has not read yet, and its memory."""

    memory: Any
    block: TokenBlock
    more: Sequence[Tensor]  # further inputs (R, q, ...)
    counts: Sequence[int]  # tokens per row
    commit: Callable[[], None]  # count them as read


@dataclass(frozen=True, eq=False)
class LayoutSeries:
    """All layouts of a draft, of n nodes in the order of reading; `counts` are those of each."""

    depths: Tensor  # (1, n)
    visible: Tensor  # (1, n, n) bool
    counts: tuple[int, ...]

    @cached_property
    def blocks(self) -> BlockSeries:
        """As blocks of tokens, computed once."""
        return BlockSeries(self.depths, self.visible, self.counts)


@dataclass(frozen=True)
class Layout:
    """Depths and attention mask of n nodes after the nodes read earlier in the round.

    Fixed for chains and static trees.
    """

    depths: Tensor  # (1 or B, n), 0 = child of the context
    visible: Tensor  # (1 or B, n, read before + n) bool: read nodes each one attends to
    shifted: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    known_parents: tuple[Tensor, int] | None = None  # of nodes read one level before, less that
    series: LayoutSeries | None = None  # which it is a part of, where all are fixed
    part: int = 0

    def place_after(self, waiting: int) -> tuple[Tensor, Tensor]:
        """Depths and attention mask after `waiting` tokens that are not cached; computed once."""
        if not waiting:
            return self.depths, self.visible
        if waiting not in self.shifted:
            before = self.visible.new_ones(*self.visible.shape[:2], waiting)
            seen = torch.cat((before, self.visible), 2)
            self.shifted[waiting] = (self.depths + waiting, seen)
        return self.shifted[waiting]

    @cached_property
    def parents(self) -> Tensor:  # (1 or B, n)
        """Index of each node's parent, counted in reading order from 1; 0 = the context.

        Nodes are read level by level, so the last earlier node that one attends to is its parent.
        """
        if self.known_parents is not None:
            return self.known_parents[0] + self.known_parents[1]
        count, total = self.visible.shape[1:]
        column = torch.arange(total, device=self.visible.device)
        before = column < torch.arange(total - count, total, device=column.device)[:, None]
        return ((self.visible & before) * (column + 1)).amax(-1)


@dataclass(frozen=True)
class DraftNodes:
    """Draft nodes to read in one forward, after the nodes read earlier in the round."""

    tokens: Tensor  # (B, n) int64
    layout: Layout
    earlier: tuple[Tensor, ...] = ()  # (B, m) each: tokens of the nodes read before, in order

    def prefix(self, context: Context) -> Prefix | None:
        """The tokens up to and including each node, for logits processors that need them."""
        if not context.sampling.needs_prefix:
            return None
        tokens = torch.cat((*self.earlier, self.tokens), 1)
        visible = self.layout.visible.expand(context.batch, -1, -1)
        return prefix_of(context, lambda: paths_of_visible(tokens, visible))

    def ahead(self, context: Context) -> Tensor | int:
        """Their depths, counted from 1, for `draft_distribution`; 0 where nothing reads them."""
        return self.layout.depths + 1 if context.sampling.position_processors else 0

    def block(self, like: Tensor, waiting: int = 0) -> TokenBlock:
        """As a token block after the cached tokens and `waiting` uncached ones, where `like` is."""
        depths, mask = self.layout.place_after(waiting)
        tokens, count = self.tokens, self.tokens.shape[1]
        before, own = mask.shape[2] - count, self.layout.series
        if tokens.device != like.device:  # a draft model on a device of its own
            tokens, depths, mask = (one.to(like.device) for one in (tokens, depths, mask))
            own = None
        series = None if waiting or own is None else own.blocks
        part = self.layout.part
        return TokenBlock(tokens, depths, mask, 0, None, before, series=series, part=part)


@dataclass(frozen=True)
class DraftUpdate:
    """The outcome of a round; `read[b]` are the accepted nodes that the draft model has read."""

    draft: Draft
    scores: Scores
    round: Round
    read: tuple[tuple[int, ...], ...]  # in reading order
    nodes_read: int  # nodes read this round
    distributions: Sequence[Categorical]  # predicted this round, in reading order


@dataclass
class GrownDraft:
    """A draft and the reading-order index of each of its nodes (-1 = not read)."""

    draft: Draft
    places: Sequence[Sequence[int]] | None  # one row for all, or per row; None = `read_order`
    distributions: list[Categorical]
    nodes_read: int = 0  # where `places` is None

    def count_read(self) -> int:
        """How many nodes the draft model has read."""
        if self.places is None:
            return self.nodes_read
        return max(max(row, default=-1) for row in self.places) + 1

    def rows(self, batch: int) -> list[Sequence[int]]:
        """`places` of every row; reads them from the device where they are `read_order`."""
        if self.places is None:
            assert self.draft.read_order is not None
            return list(self.draft.read_order.tolist())
        return [self.places[row if len(self.places) > 1 else 0] for row in range(batch)]

    def token_probs(self) -> Tensor | None:  # (B, N)
        """Probability of each token after its parent; None = the distributions are not known."""
        draft = self.draft
        if not draft.nodes or not self.distributions:
            return None
        if self.places is not None and not any(self.places):  # one distribution per depth
            rows = draft.depths()
        else:
            read = draft.read_order
            if self.places is not None:
                own = self.rows(draft.batch)
                if {len(row) for row in own} != {draft.nodes}:  # another drafter drafted a row
                    return None
                read = torch.tensor(own, device=draft.tokens.device)
            assert read is not None
            after = read.gather(1, draft.parents.clamp_min(0)) + 1
            rows = torch.where(draft.parents < 0, 0, after)
        scores = torch.cat([one.scores for one in self.distributions], 1)
        return probs_of_tokens(scores, rows, draft.tokens)

    def accepted_reads(self, round_: Round) -> tuple[tuple[int, ...], ...]:
        """Per row, the accepted nodes that the draft model has read, in reading order.

        A row without indices was drafted by another drafter.
        """
        found = round_.read
        if self.places is not None or found is None:
            pairs = zip(self.rows(len(round_.path)), round_.path, strict=True)
            found = tuple(tuple(own[node] for node in path) if own else () for own, path in pairs)
        return tuple(tuple(place for place in row if place >= 0) for row in found)


@dataclass(frozen=True)
class ModelDrafter(Drafter):
    """A drafter that sees, requires and takes what its draft model does."""

    model: DraftModel

    sees = delegate_to("model.sees")
    required_features = delegate_to("model.required_features")
    reads_prompt = delegate_to("model.reads_prompt")
    input_names = delegate_to("model.input_names")

    def prepare_inputs(self, inputs: Mapping[str, Any], batch: int) -> Mapping[str, Any]:
        return super().prepare_inputs(self.model.prepare_inputs(inputs, batch), batch)


class MultiKindDrafter(Drafter):
    """A drafter that can draw siblings in any of its `choices`, unless `kind` is set."""

    kind: Kind | None

    @property
    @abstractmethod
    def choices(self) -> tuple[Kind, ...]: ...

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return self.choices if self.kind is None else (self.kind,)

    def with_kind(self, kind: Kind) -> Drafter:
        own: Any = self
        drafter: Drafter = replace(own, kind=kind)
        return drafter


def empty_growth(context: Context, distributions: Sequence[Categorical] = ()) -> GrownDraft:
    return GrownDraft(Draft.empty(context.batch, context.device), [()], list(distributions))


def draw_next_token(
    distribution: Categorical, kind: Kind, context: Context, step: int | Tensor
) -> Tensor:  # (B, 1)
    """Draw the next token of a chain, after `step` others: a number, or one per row (B, 1)."""
    if distribution.hard:
        return distribution.scores.argmax(-1)
    steps = step_indices(distribution.scores.device)
    index = steps[step : step + 1] if isinstance(step, int) else step
    return draw(distribution, 1, kind, context.noise, context.position() + step, index)[:, :, 0]


@lru_cache(maxsize=256)
def chain_layout(step: int, device: torch.device) -> Layout:
    """The layout of one node after `step` others of a chain."""
    depths = torch.full((1, 1), step, device=device)
    return Layout(depths, torch.ones(1, 1, step + 1, dtype=torch.bool, device=device))


@lru_cache(maxsize=8)
def step_indices(device: torch.device) -> Tensor:
    return torch.arange(1024, device=device)


def draft_distribution(
    context: Context, logits: Tensor, prefix: Prefix | None, ahead: Tensor | int = 0
) -> Categorical:
    """The drafter's distribution from its logits (B, n, V'), with the target's sampling settings.

    `ahead` (1 or B, n) draft tokens lie between the context and the predicted token. Vocabularies
    that differ by padding only are brought to the target's size; tokens that the drafter lacks have
    q = 0. Logits of a draft model on another device are moved to the target's.
    """
    logits = logits.to(context.device)
    missing = context.vocabulary - logits.shape[-1]
    if missing:
        logits = functional.pad(logits, (0, missing), value=-torch.inf)  # negative = cut
    position = context.position() + ahead if context.sampling.position_processors else None
    sampling = context.sampling.of_drafts
    made = sampling.distribution(logits, prefix, position)
    if not sampling.is_constrained:
        return made
    return Categorical(keep_possible(made.scores, logits), made.hard)


def move_tensors(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The inputs of a draft model on its device."""
    return {n: one.to(device) if isinstance(one, Tensor) else one for n, one in inputs.items()}


def predict_ahead(context: Context, logits: Tensor, nodes: DraftNodes) -> Categorical:  # (B, n)
    """Distributions after draft nodes, from logits (B, K, V) of the next K tokens by depth."""
    depths = nodes.layout.depths + 1
    places = depths.expand(context.batch, -1)[..., None].expand(-1, -1, logits.shape[-1])
    return draft_distribution(context, logits.gather(1, places), nodes.prefix(context), depths)


def committed_prefix(context: Context) -> Prefix | None:
    """The committed tokens, for logits processors that need them."""
    return prefix_of(context) if context.sampling.needs_prefix else None


def waiting_block(
    context: Context, read: Sequence[int], like: Tensor, draft: Draft | None = None
) -> tuple[TokenBlock, list[int]]:
    """The committed tokens after the first `read[b]` of each row, and their number.

    A finished row repeats its last token. A `draft` follows them.
    """
    counts = [len(row) - done for row, done in zip(context.history, read, strict=True)]
    waiting = [
        row[len(row) - max(count, 1) :] for row, count in zip(context.history, counts, strict=True)
    ]
    return build_block(waiting, draft, like), counts
