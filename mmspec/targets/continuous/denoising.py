"""The target of a denoising chain: tokens are latents, distributions are Gaussian, the chain is the tree.

Row b stands at step `step[b]` in state `state[b]`. One call of the network serves any number of
states, whatever their steps, so a drafted window is scored like a block of tokens.

    step        3        4        5        6
    row 0     state -> [x4   ->  x5   ->  x6]     scored at 3 (unless known), 4, 5 and 6
    row 1              state -> [x5   ->  x6]     images go at their own pace
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
    """What a network sees in R states: the clean sample, and a std where it predicts one."""

    clean: Tensor  # (R, *E)
    std: Tensor | None = None  # (R, *E) of the step from each state; None = the kernel's

    def __getitem__(self, index: slice | Tensor) -> Prediction:
        return Prediction(self.clean[index], None if self.std is None else self.std[index])


class Denoiser(Protocol):
    """A network with its conditions and its sampler's grid; holds no state of any chain.

    `predict` reads states (R, *E) float32 at `step` (R,), belonging to the images `row` (R,) of the
    request; guidance, scaling and clipping are its business. Every row must be computed on its own.
    `width` is how many rows of the network one state takes (2 with guidance).
    """

    @property
    def kernel(self) -> GaussianKernel: ...
    @property
    def width(self) -> int: ...
    def predict(self, states: Tensor, step: Tensor, row: Tensor) -> Prediction: ...


@dataclass(frozen=True)
class ChainRequest:
    """One sampling call: where the chains start."""

    start: Tensor  # (B, *E) float32, the noise of state 0
    noise: KeyedNoise


@dataclass
class Known:
    """What the network has seen of each row: the one mutable object of a request.

    `clean` (and `state`, `step`: where it was seen) is the newest prediction at a committed state,
    per row; `fresh[b]` says whether that is the state the row stands in. A draft may use these:
    what was seen in rejected states is never offered, it would give away noise not used yet.
    """

    prediction: Prediction  # (B, *E), its clean sample continued as the kernel's solver does
    seen: Tensor  # (B, *E), the clean sample as it was seen, and what was seen one step before it
    before: Tensor
    state: Tensor  # (B, *E)
    step: list[int]
    fresh: list[bool]
    ever: list[bool]  # whether anything was predicted yet
    calls: int = 0  # network calls not yet reported in a round
    rows: int = 0  # rows of the network so far
    scored: Prediction | None = None  # (B, N + 1, *E) of the draft being verified, as seen
    moved: Tensor | None = None  # its clean samples, continued


@dataclass(frozen=True)
class Trajectory:
    """The context of a denoising chain."""

    request: ChainRequest
    state: Tensor  # (B, *E)
    step: tuple[int, ...]  # transitions taken per row
    noise: KeyedNoise
    kernel: GaussianKernel
    known: Known
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
    def left(self) -> tuple[int, ...]:
        """Transitions still to take per row."""
        return tuple(self.kernel.steps - step for step in self.step)

    def generated(self, row: int) -> int:
        return self.step[row]

    def emitted(self) -> list[list[Tensor]]:
        """The state each row has reached."""
        return [[state] if step else [] for state, step in zip(self.state, self.step, strict=True)]

    def nothing(self) -> Draft:
        """A draft without a node."""
        return Draft.empty(self.batch, self.device, self.state.dtype, self.event)

    def position(self) -> Tensor:  # (B, 1)
        """Index of the next state; keys its noise."""
        return torch.tensor([[step + 1] for step in self.step], device=self.device)

    def at_round(self, index: int) -> Trajectory:
        return replace(self, noise=self.noise.at_round(index))

    def room(self, most: int, deterministic: bool = False) -> list[int]:
        """How many states may be drafted per row: random transitions ahead, and one to follow.

        The last state of a chain is never drafted: it is the target's own, after the last node.
        With `deterministic`, transitions without noise count as well: a tolerance can verify them.
        """
        found = []
        for step, done in zip(self.step, self.finished, strict=True):
            ahead = self.kernel.is_random[step : step + most]
            run = ahead.index(False) if False in ahead and not deterministic else len(ahead)
            found.append(0 if done else max(0, min(run, self.kernel.steps - step - 1)))
        return found


@dataclass(frozen=True)
class ChainTarget:
    """Scores drafted states with one pass of the network over all of them.

    `max_rows` cuts the pass into pieces of at most so many network rows; rows are independent, so
    that changes nothing but memory and, in the last bits, rounding.
    """

    denoiser: Denoiser
    max_rows: int | None = None
    can_branch: ClassVar[bool] = True  # nothing is remembered that a branch could disturb

    def __post_init__(self) -> None:
        if self.max_rows is not None and self.max_rows < self.denoiser.width:
            raise ValueError(
                f"max_rows={self.max_rows} does not hold one state, which takes "
                f"{self.denoiser.width} network rows; raise it"
            )

    def prefill(self, request: ChainRequest) -> Trajectory:
        """Nothing is read: a chain starts with noise."""
        start, batch = request.start, request.start.shape[0]
        none = torch.zeros_like(start)
        known = Known(
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
        """Predict at the current state of `rows`, where that is not known already."""
        wanted = [row for row in rows if not context.known.fresh[row]]
        if not wanted:
            return
        known, index = context.known, torch.tensor(wanted, device=context.device)
        step = torch.tensor(context.step, device=context.device)[index]
        seen = self._predict(known, context.state[index], step, index)
        known.before = known.before.index_copy(0, index, known.seen[index])
        known.seen = known.seen.index_copy(0, index, seen.clean)
        moved = self.denoiser.kernel.continued(seen.clean, known.before[index], step)
        clean = known.prediction.clean.index_copy(0, index, moved)
        known.prediction = Prediction(clean, _merged(known.prediction.std, seen.std, index, clean))
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
        step = (position - 1).clamp_max(self.denoiser.kernel.steps - 1)
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
        clean = known.moved = self._continued(context, draft, clean, step)
        mean = self.denoiser.kernel.mean(states, clean, step)
        spread = self.denoiser.kernel.deviation(step, states) if std is None else std
        calls, known.calls = known.calls, 0
        distribution = Gaussian(mean, spread, len(context.event))
        scale = at_step(self.denoiser.kernel.noise_scale, step, states)
        features = {"state": states, "clean": clean, "scale": scale}
        return Scores(distribution, position, features, calls)

    def keep(self, context: Trajectory, draft: Draft, kept: Round) -> Trajectory:
        """Move every row to the last state kept of it; remember what was seen just before."""
        known, step, state = context.known, list(context.step), context.state.clone()
        assert known.scored is not None
        assert known.moved is not None
        rows = [row for row, tokens in enumerate(kept.tokens) if tokens]
        last = torch.tensor([kept.path[row][-1] + 1 if kept.path[row] else 0 for row in rows])
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
            std = _merged(known.prediction.std, seen.std, index, clean)
            known.prediction = Prediction(clean, std)
            states = torch.cat((context.state[:, None], draft.tokens), 1)
            known.state = known.state.index_copy(0, index, states[index, last])
        for row in rows:
            state[row] = kept.tokens[row][-1]
            step[row] += len(kept.tokens[row])
            known.step[row], known.fresh[row], known.ever[row] = step[row] - 1, False, True
        known.scored = known.moved = None
        return replace(context, state=state, step=tuple(step), finished=kept.finished)

    def _continued(
        self, context: Trajectory, draft: Draft, clean: Tensor, step: Tensor
    ) -> Tensor:  # (B, N + 1, *E), (B, N + 1)
        """The clean samples that move the context and all nodes, by those of their parents."""
        known, rows = context.known, torch.arange(context.batch, device=context.device)[:, None]
        fresh = torch.tensor(known.fresh, device=clean.device).reshape(
            -1, *(1,) * (clean.dim() - 2)
        )
        first = torch.where(fresh, known.before, known.seen)[:, None]
        # what is known of a state that is not fresh yet is what was seen one step before it
        before = torch.cat((first, clean[rows, draft.parents + 1]), 1)
        return self.denoiser.kernel.continued(clean, before, step)

    def _predict(self, known: Known, states: Tensor, step: Tensor, row: Tensor) -> Prediction:
        """One network call, in pieces of `max_rows`."""
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


def _merged(old: Tensor | None, new: Tensor | None, index: Tensor, like: Tensor) -> Tensor | None:
    """Predicted standard deviations, updated at the rows `index`."""
    if new is None:
        return old
    base = torch.ones_like(like) if old is None else old
    return base.index_copy(0, index, new)
