"""Drafts grown by one compiled graph: every forward of the draft model and the draws between.

A `Shape` runs as it is, on tensors alone: it gets a `GraphModel` in place of the draft model and a
`GraphContext` in place of the context. The draft model declares its part in `GraphSteps` and
`FirstBlock`. Drafts of other sizes (near the end of an output), of rows with limits of their own
and with processors of logits are grown forward by forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec._attributes import delegate_to
from mmspec.distributions.categorical import Categorical, as_categorical
from mmspec.distributions.noise import KeyedNoise
from mmspec.distributions.sampling import Sampling
from mmspec.draft import Draft, Drafter, Kind
from mmspec.drafters.draft_model import (
    DraftModel,
    DraftNodes,
    DraftUpdate,
    FirstBlock,
    GraphSteps,
    GrownDraft,
    draft_distribution,
)
from mmspec.drafters.lengths.length import max_useful_length
from mmspec.drafters.shapes import Shape
from mmspec.stats import DRAFTER, CompileLog
from mmspec.targets.fixed import pad, round_length
from mmspec.targets.graphs import Function, GraphSet, parse_backend, trace
from mmspec.targets.readers.compiled import place_block, symbolic_axes
from mmspec.targets.readers.reader import Reader
from mmspec.targets.readers.rounding import rounding_margin, score_difference
from mmspec.targets.tokens.context import Context
from mmspec.trees import all_true_mask

MAX_SETTINGS = 4  # of sampling: each has graphs of its own
_LEAST = 2  # tokens of a first block: a graph for any number of them has none for one alone


@dataclass(frozen=True)
class GraphContext:
    """What a shape reads of a context, as tensors; a round has room for its whole draft."""

    place: Tensor  # (R, 1) position of the next token
    noise: KeyedNoise
    sampling: Sampling
    vocabulary: int
    row_limits: ClassVar[None] = None

    @property
    def batch(self) -> int:
        return len(self.place)

    @property
    def device(self) -> torch.device:
        return self.place.device

    @property
    def finished(self) -> tuple[bool, ...]:
        return (False,) * self.batch

    @property
    def request(self) -> GraphContext:
        return self

    def num_left(self, row: int) -> int:
        return 1 << 30

    @property
    def lengths(self) -> Tensor:  # (R, 1)
        return self.place

    def position(self) -> Tensor:  # (R, 1)
        return self.place


class GraphModel(DraftModel):
    """A draft model inside a graph, whose forwards read `buffers` (base, offsets, parts)."""

    sees = "nothing"

    def __init__(self, steps: GraphSteps, first: Sequence[Any], counts: Tensor, last: Tensor):
        self.steps, self.first, self.buffers = steps, first[:5], first[5:]
        self.step = steps.make_step()
        self.counts, self.last = counts, last
        self.fed: list[Tensor] = []  # (R, n, D) each: what later blocks are fed with
        self.distributions: list[Categorical] = []
        self.read: list[Tensor] = []  # (R, n) tokens of the blocks after the first

    def predict_first(self, context: Any, state: Any) -> Categorical:
        out = self.step(*self.first, *self.buffers)
        return self._predict(context, [one.index_select(1, self.last) for one in out])

    def predict(self, context: Any, state: Any, nodes: DraftNodes) -> Categorical:
        self.read.append(nodes.tokens)
        layout, columns = nodes.layout, self.first[4]
        depths, corner = layout.depths, layout.visible
        count, rows = nodes.tokens.shape[1], context.batch
        kept, rope = columns[0] + self.counts, columns[2] + self.counts
        first = kept + (corner.shape[2] - count)
        placed = torch.stack((kept, first, rope, torch.zeros_like(kept), columns[4]))
        depths, corner = depths.expand(rows, -1), corner.expand(rows, -1, -1)
        more = self.steps.feed(self.fed, layout.parents.expand(rows, -1), depths, self.first[1])
        out = self.step(nodes.tokens, more, depths, corner, placed, *self.buffers)
        return self._predict(context, out)

    def _predict(self, context: Any, out: Sequence[Tensor]) -> Categorical:
        self.fed.append(out[-1])
        found = draft_distribution(context, self.steps.predict(out), None)
        self.distributions.append(found)
        return found


@dataclass(frozen=True)
class CompiledShape(Shape):
    """A shape that is grown by one graph where its size is fixed."""

    shape: Shape
    graphs: GraphSet
    grown: dict[Any, GrownDraft] = field(default_factory=dict)  # an example of each graph's drafts
    checked: dict[Any, GraphModel] = field(
        default_factory=dict
    )  # runs of functions not compared yet
    settings: list[Sampling] = field(default_factory=list)  # of sampling, that have graphs

    kinds = delegate_to("shape.kinds")
    walk = delegate_to("shape.walk")
    description = delegate_to("shape.description")
    max_depth = delegate_to("shape.max_depth")
    fixed_reads = delegate_to("shape.fixed_reads")

    def check(self, model: DraftModel) -> None:
        self.shape.check(model)

    def begin(self) -> Any:
        return self.shape.begin()

    def observe(self, shape_state: Any, update: DraftUpdate) -> Any:
        return self.shape.observe(shape_state, update)

    def grow(
        self, model: DraftModel, context: Context, state: Any, shape_state: Any, kind: Kind
    ) -> GrownDraft:
        steps = self._steps(model, context)
        first = None if steps is None else model.first_block(context, state)
        if steps is None or first is None or not steps.blocks.is_ready(first.memory):
            return self.shape.grow(model, context, state, shape_state, kind)
        inputs = self._place(context, first)
        key = (steps.blocks.graphs.version, kind, context.sampling, len(inputs[0]))
        stepwise: list[GrownDraft] = []
        recorded: Any = _Recorder(model)
        if key not in self.graphs.graphs:
            stepwise = [self.shape.grow(recorded, context, state, shape_state, kind)]

        def make() -> Function:
            function = self._make_function(steps, context, kind, key)
            function(*inputs)  # makes the constants that it keeps
            return function

        def compare(out: Sequence[Tensor]) -> float | None:
            return self._difference(key, out, recorded, context.batch)

        out = self.graphs.run(key, make, inputs, partial(symbolic_axes, inputs[:8]), compare)
        if stepwise:
            return stepwise[0]
        assert out is not None
        first.commit()
        return _restore(self.grown[key], out, context.batch)

    def _steps(self, model: DraftModel, context: Context) -> GraphSteps | None:
        """The draft model's part, if this round's draft is one of the graph's."""
        if self.graphs.is_refused:
            return None
        if context.request.row_limits is not None:
            self.graphs.note("rows of an engine end on their own, so each forward is a graph")
            return None
        if context.sampling.has_processors:
            self.graphs.note("logits are processed between its forwards, each of which is a graph")
            return None
        if context.sampling not in self.settings:
            if len(self.settings) == MAX_SETTINGS:
                self.graphs.note(f"more than {MAX_SETTINGS} settings of sampling")
                return None
            self.settings.append(context.sampling)
        is_whole = max_useful_length(context) >= self.max_depth
        return model.graph_steps() if is_whole else None

    def _place(self, context: Context, first: FirstBlock) -> tuple[Any, ...]:
        """The inputs of the function: those of the first block, and what the context has."""
        memory, length = first.memory, round_length(max(first.block.length, _LEAST))
        assert self.fixed_reads is not None
        memory.fixed.fit(memory, max(memory.lengths) + length + self.fixed_reads)
        placed, noise = place_block(memory, first.block, first.more, _LEAST), context.noise
        rows = len(placed[0])
        starts = torch.zeros_like(noise.rows) if noise.starts is None else noise.starts
        counts = torch.tensor(first.counts, device=placed[0].device)
        last = torch.tensor([first.block.length - 1], device=counts.device)
        of_rows = [pad(one, (rows,)) for one in (counts, noise.rows, starts - noise.round)]
        return (*placed, last, *of_rows, pad(context.position(), (rows, 1)))

    def _make_function(self, steps: GraphSteps, context: Context, kind: Kind, key: Any) -> Function:
        step, sampling, vocabulary = steps.make_step(), context.sampling, context.vocabulary

        def grow(*inputs: Any) -> list[Tensor]:
            first, (last, counts, rows, starts, place) = inputs[:8], inputs[8:]
            noise = KeyedNoise(rows, 0, starts, num_ahead=1)
            model = GraphModel(replace(steps, make_step=lambda: step), first, counts, last)
            own: Any = GraphContext(place, noise, sampling, vocabulary)
            grown = self.shape.grow(model, own, None, None, kind)
            if key not in self.grown:
                self.grown[key], self.checked[key] = replace(grown, distributions=[]), model
            return _tensors_of(grown.draft, model.distributions)

        return grow

    def _difference(
        self, key: Any, out: Sequence[Tensor], stepwise: _Recorder, batch: int
    ) -> float | None:
        """How far the scores of a new graph are from stepwise ones; None if by rounding only.

        Those of the function as it is are compared level by level, and its best ones with those of
        the graph; both as long as the tokens agree.
        """
        own, draft = self.checked.pop(key), self.grown[key].draft
        gaps, read = [], zip([None, *own.read], [None, *stepwise.read], strict=True)
        levels = zip(own.distributions, stepwise.distributions, read, strict=True)
        for ours, theirs, (mine, other) in levels:
            if mine is not None and other is not None and not torch.equal(mine[:batch], other):
                break
            pair = _hide_excluded(ours.scores[:batch], theirs.scores)
            gaps.append(float(score_difference(*pair)))
        if torch.equal(draft.tokens[:batch], out[0][:batch]):
            best = _tensors_of(draft, own.distributions)[-1]
            gaps.append(float(score_difference(out[-1][:batch], best[:batch])))
        dtype = stepwise.distributions[0].scores.dtype
        return max(gaps) if max(gaps) > rounding_margin(dtype) else None


class _Recorder:
    """A draft model that records the tokens it reads after the first block, and its results."""

    def __init__(self, model: DraftModel) -> None:
        self.model = model
        self.read: list[Tensor] = []
        self.distributions: list[Categorical] = []

    def predict_first(self, context: Context, state: Any) -> Categorical:
        self.distributions.append(self.model.predict_first(context, state))
        return self.distributions[-1]

    def predict(self, context: Context, state: Any, nodes: DraftNodes) -> Categorical:
        self.read.append(nodes.tokens)
        self.distributions.append(self.model.predict(context, state, nodes))
        return self.distributions[-1]


def _hide_excluded(ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """Scores in which excluded tokens (-inf) have the lowest of the others."""
    lowest = theirs.masked_fill(theirs.isinf(), torch.inf).amin()
    return ours.clamp_min(lowest), theirs.clamp_min(lowest)


def _tensors_of(draft: Draft, distributions: Sequence[Categorical]) -> list[Tensor]:
    """What a graph returns of a draft, and the best score of every distribution."""
    found = [draft.tokens]
    if draft.tree is None:
        assert draft.read_order is not None
        found += [draft.parents, draft.read_order]
    if draft.distribution is not None:
        found.append(as_categorical(draft.distribution).scores)
    return [*found, torch.cat([one.scores.amax(-1) for one in distributions], 1)]


def _restore(example: GrownDraft, out: Sequence[Tensor], batch: int) -> GrownDraft:
    """The draft of a graph's results, in the form of an example."""
    draft, (tokens, *more) = example.draft, [one[:batch] for one in out[:-1]]
    distribution = None
    if draft.distribution is not None:
        distribution = Categorical(more.pop(), as_categorical(draft.distribution).hard)
    if draft.tree is not None:
        made = Draft.from_tree(draft.tree, tokens, draft.kind, distribution)
    else:
        parents, read_order = more
        mask = all_true_mask(batch, tokens.shape[1], tokens.device)
        made = replace(
            draft,
            tokens=tokens,
            parents=parents,
            mask=mask,
            distribution=distribution,
            read_order=read_order,
        )
    return replace(example, draft=made)


def _why_stepwise(shape: Shape, model: DraftModel) -> str | None:
    """Why a draft is grown forward by forward; None if by one graph."""
    if model.is_parallel:
        return "its one forward is the graph"
    if shape.fixed_reads is None:
        return f"a {shape.description} changes its size, so each forward is a graph"
    if model.graph_steps() is None:
        return "each forward is a graph of its own"
    return None


def find_draft_model(drafter: Drafter, reader: Any) -> Any:
    """What reads blocks for a drafter: its reader or its draft model; None for one by hand."""
    model = vars(drafter).get("model")
    return model if isinstance(model, DraftModel) and not isinstance(reader, Reader) else reader


def compile_growth(drafter: Drafter, log: CompileLog, option: bool | str) -> Drafter:
    """The drafter with its draft grown by one graph; itself where it grows none."""
    shape = vars(drafter).get("shape")
    if not isinstance(shape, Shape):
        return drafter
    backend = parse_backend(option)
    name, depth = "the draft outside its forwards", shape.max_depth
    graphs = GraphSet(name, log, backend, DRAFTER, depth, tracer=trace)
    own: Any = drafter
    reason = _why_stepwise(shape, own.model)
    if reason is not None:
        if not log.reasons.get(DRAFTER):
            graphs.note(reason)
        return drafter
    compiled: Drafter = replace(own, shape=CompiledShape(shape, graphs))
    return compiled
