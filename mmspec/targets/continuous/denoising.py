"""The target of a denoising chain: tokens are latents, distributions are Gaussian.

Row b is at step `step[b]` in state `state[b]`. One call of the network takes any number of states
at any steps, so a drafted window is scored like a block of tokens.

    step        3        4        5        6
    row 0     state -> [x4   ->  x5   ->  x6]     scored at 3 (unless known), 4, 5 and 6
    row 1              state -> [x5   ->  x6]     rows advance independently
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from mmspec.distributions.gaussian import Gaussian
from mmspec.distributions.kernels import GaussianKernel, at_step
from mmspec.distributions.noise import KeyedNoise
from mmspec.draft import Draft, Round, Scores


@dataclass(frozen=True)
class Prediction:
    """The prediction of a network in R states: the clean sample, and a std if it has one."""

    clean: Tensor  # (R, *E)
    std: Tensor | None = None  # (R, *E) of the step from each state; None = the kernel's

    def __getitem__(self, index: slice | Tensor) -> Prediction:
        return Prediction(self.clean[index], None if self.std is None else self.std[index])


class Denoiser(Protocol):
    """A network with its conditions and its sampler's grid; holds no state of any chain.

    `predict` reads states (R, *E) float32 at `step` (R,) of the images `row` (R,) of the request,
    including guidance, scaling and clipping. Rows must be computed independently. `width` is the
    number of network rows per state (2 with guidance).
    """

    @property
    def kernel(self) -> GaussianKernel: ...
    @property
    def width(self) -> int: ...
    def predict(self, states: Tensor, step: Tensor, row: Tensor) -> Prediction: ...


@dataclass(frozen=True)
class ChainRequest:
    """One sampling call with the start of its chains."""

    start: Tensor  # (B, *E) float32, the noise of state 0
    noise: KeyedNoise


@dataclass
class KnownPredictions:
    """Predictions of the network per row: the only mutable object of a request.

    `clean` (with its `state` and `step`) is the newest prediction at a committed state, per row;
    `fresh[b]` is whether that is the row's current state. A draft may use these; predictions in
    rejected states are never shared, as they would reveal noise that is not used yet.
    """

    prediction: Prediction  # (B, *E), its clean sample continued by the kernel's solver
    seen: Tensor  # (B, *E), the clean sample as predicted, and the prediction one step before it
    before: Tensor
    state: Tensor  # (B, *E)
    step: list[int]
    fresh: list[bool]
    ever: list[bool]  # whether there was a prediction yet
    calls: int = 0  # network calls not yet reported in a round
    rows: int = 0  # rows of the network so far
    scored: Prediction | None = None  # (B, N + 1, *E) of the draft being verified, as predicted
    moved: Tensor | None = None  # its clean samples, continued


@dataclass(frozen=True)
class Trajectory:
    """The context of a denoising chain."""

    request: ChainRequest
    state: Tensor  # (B, *E)
    step: tuple[int, ...]  # transitions taken per row
    noise: KeyedNoise
    kernel: GaussianKernel
    known: KnownPredictions
    look: Callable[[Trajectory, Sequence[int]], None]  # predict at the current state of some rows
    finished: tuple[bool, ...] = ()
    scores: Scores | None = None
    prefix: None = None  # latents have no ids
    shared: dict[str, Tensor] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        return self.state.shape[0]

    @property
    def device(self) -> torch.device:
        return self.state.device

    @property
    def event(self) -> torch.Size:
        return self.state.shape[1:]

    @property
    def steps_left(self) -> tuple[int, ...]:
        """Transitions still to take per row."""
        return tuple(self.kernel.num_steps - step for step in self.step)

    def num_generated(self, row: int) -> int:
        return self.step[row]

    def generated_tokens(self) -> list[list[Tensor]]:
        """The current state of each row."""
        return [[state] if step else [] for state, step in zip(self.state, self.step, strict=True)]

    def empty_draft(self) -> Draft:
        """A draft without nodes."""
        return Draft.empty(self.batch, self.device, self.state.dtype, self.event)

    def position(self) -> Tensor:  # (B, 1)
        """Index of the next state; keys its noise."""
        return torch.tensor([[step + 1] for step in self.step], device=self.device)

    def at_round(self, index: int) -> Trajectory:
        return replace(self, noise=self.noise.at_round(index))

    def max_draft_lengths(self, most: int, deterministic: bool = False) -> list[int]:
        """Maximum draft length per row: the number of random transitions before the last state.

        The last state of a chain is never drafted: it is the target's own, after the last node.
        With `deterministic`, transitions without noise are included, for verifiers with tolerance.
        """
        found = []
        for step, done in zip(self.step, self.finished, strict=True):
            ahead = self.kernel.is_random[step : step + most]
            run = ahead.index(False) if False in ahead and not deterministic else len(ahead)
            found.append(0 if done else max(0, min(run, self.kernel.num_steps - step - 1)))
        return found


@dataclass(frozen=True)
class ChainTarget:
    """Scores drafted states with one pass of the network over all of them.

    `max_rows` splits the pass into chunks of network rows; rows are independent, so that this
    changes only memory and rounding.
    """

    denoiser: Denoiser
    max_rows: int | None = None
    reads_trees: ClassVar[bool] = True  # no cache that a branch could change

    def __post_init__(self) -> None:
        if self.max_rows is not None and self.max_rows < self.denoiser.width:
            raise ValueError(
                f"max_rows={self.max_rows} does not hold one state, which takes "
                f"{self.denoiser.width} network rows; raise it"
            )

    def prefill(self, request: ChainRequest) -> Trajectory:
        """Start the chains at their noise; nothing is read."""
        start, batch = request.start, request.start.shape[0]
        none = torch.zeros_like(start)
        known = KnownPredictions(
            Prediction(none), none, none, start, [0] * batch, [False] * batch, [False] * batch
        )
        return Trajectory(
            request,
            start,
            (0,) * batch,
            request.noise,
            self.denoiser.kernel,
            known,
            self.look,
            (False,) * batch,
        )

    def look(self, context: Trajectory, rows: Sequence[int]) -> None:
        """Predict at the current state of `rows`, unless known."""
        wanted = [row for row in rows if not context.known.fresh[row]]
        if not wanted:
            return
        known, index = context.known, torch.tensor(wanted, device=context.device)
        step = torch.tensor(context.step, device=context.device)[index]
        seen = self._predict(known, context.state[index], step, index)
        known.before = known.before.index_copy(0, index, known.seen[index])
        known.seen = known.seen.index_copy(0, index, seen.clean)
        moved = self.denoiser.kernel.extrapolate(seen.clean, known.before[index], step)
        clean = known.prediction.clean.index_copy(0, index, moved)
        known.prediction = Prediction(
            clean, _merge_stds(known.prediction.std, seen.std, index, clean)
        )
        known.state = known.state.index_copy(0, index, context.state[index])
        for row in wanted:
            known.step[row], known.fresh[row], known.ever[row] = context.step[row], True, True

    def score(self, context: Trajectory, draft: Draft) -> Scores:
        """One pass over the states not known yet: those of the context, and all draft nodes."""
        known, batch, device = context.known, context.batch, context.device
        states = torch.cat((context.state[:, None], draft.tokens), 1)  # (B, N + 1, *E)
        position = context.position()
        if draft.nodes:
            position = torch.cat((position, position + 1 + draft.depths()), 1)
        alive = torch.tensor([not done for done in context.finished], device=device)[:, None]
        mask = torch.cat((draft.mask.new_ones(batch, 1), draft.mask), 1) & alive
        mask[:, 0] &= ~torch.tensor(known.fresh, device=device)
        row, node = mask.nonzero(as_tuple=True)
        step = (position - 1).clamp_max(self.denoiser.kernel.num_steps - 1)
        clean = torch.zeros_like(states)
        clean[:, 0] = known.seen
        std = None
        if len(row):
            seen = self._predict(known, states[row, node], step[row, node], row)
            clean[row, node] = seen.clean
            if seen.std is not None:
                std = torch.ones_like(states)
                if known.prediction.std is not None:
                    std[:, 0] = known.prediction.std
                std[row, node] = seen.std
        else:
            std = None if known.prediction.std is None else known.prediction.std[:, None]
        known.scored = Prediction(clean, std)
        clean = known.moved = self._continue_samples(context, draft, clean, step)
        mean = self.denoiser.kernel.mean(states, clean, step)
        spread = self.denoiser.kernel.std_at(step, states) if std is None else std
        calls, known.calls = known.calls, 0
        distribution = Gaussian(mean, spread, len(context.event))
        scale = at_step(self.denoiser.kernel.noise_scale, step, states)
        features = {"state": states, "clean": clean, "scale": scale}
        return Scores(distribution, position, features, calls)

    def keep(self, context: Trajectory, draft: Draft, round_: Round) -> Trajectory:
        """Move every row to its last accepted state; store the prediction just before it."""
        known, step, state = context.known, list(context.step), context.state.clone()
        assert known.scored is not None
        assert known.moved is not None
        rows = [row for row, tokens in enumerate(round_.tokens) if tokens]
        last = torch.tensor([round_.path[row][-1] + 1 if round_.path[row] else 0 for row in rows])
        index = torch.tensor(rows, dtype=torch.int64, device=context.device)
        last = last.to(context.device)
        if rows:
            seen = Prediction(
                known.scored.clean[index, last],
                None if known.scored.std is None else known.scored.std[index, last],
            )
            known.seen = known.seen.index_copy(0, index, seen.clean)
            moved = known.moved[index, last]
            clean = known.prediction.clean.index_copy(0, index, moved)
            std = _merge_stds(known.prediction.std, seen.std, index, clean)
            known.prediction = Prediction(clean, std)
            states = torch.cat((context.state[:, None], draft.tokens), 1)
            known.state = known.state.index_copy(0, index, states[index, last])
        for row in rows:
            state[row] = round_.tokens[row][-1]
            step[row] += len(round_.tokens[row])
            known.step[row], known.fresh[row], known.ever[row] = step[row] - 1, False, True
        known.scored = known.moved = None
        return replace(context, state=state, step=tuple(step), finished=round_.finished)

    def _continue_samples(
        self, context: Trajectory, draft: Draft, clean: Tensor, step: Tensor
    ) -> Tensor:  # (B, N + 1, *E), (B, N + 1)
        """The clean samples of context and nodes, continued from those of their parents."""
        known, rows = context.known, torch.arange(context.batch, device=context.device)[:, None]
        fresh = torch.tensor(known.fresh, device=clean.device).reshape(
            -1, *(1,) * (clean.dim() - 2)
        )
        first = torch.where(fresh, known.before, known.seen)[:, None]
        # the known prediction of a state that is not fresh is that of one step before
        before = torch.cat((first, clean[rows, draft.parents + 1]), 1)
        return self.denoiser.kernel.extrapolate(clean, before, step)

    def _predict(
        self, known: KnownPredictions, states: Tensor, step: Tensor, row: Tensor
    ) -> Prediction:
        """One network call, in chunks of `max_rows`."""
        known.calls += 1
        known.rows += len(row) * self.denoiser.width
        size = len(row) if self.max_rows is None else self.max_rows // self.denoiser.width
        parts = [
            self.denoiser.predict(a, b, c)
            for a, b, c in zip(states.split(size), step.split(size), row.split(size), strict=True)
        ]
        if len(parts) == 1:
            return parts[0]
        stds = [part.std for part in parts if part.std is not None]
        clean = torch.cat([part.clean for part in parts])
        return Prediction(clean, torch.cat(stds) if stds else None)


def _merge_stds(
    old: Tensor | None, new: Tensor | None, index: Tensor, like: Tensor
) -> Tensor | None:
    """Predicted standard deviations, updated at the rows `index`."""
    if new is None:
        return old
    base = torch.ones_like(like) if old is None else old
    return base.index_copy(0, index, new)
