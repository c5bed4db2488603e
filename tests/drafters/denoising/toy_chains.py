"""A decoding loop for drafters of denoising chains, and statistics of exact chains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspec.decode import Parts, decode
from mmspec.distributions.kernels import GaussianKernel
from mmspec.distributions.noise import KeyedNoise
from mmspec.draft import Draft, Drafter, Kind, Round, Scores, Verifier
from mmspec.drafters.plain import NoDraft
from mmspec.targets.continuous.denoising import (
    ChainRequest,
    ChainTarget,
    Denoiser,
    Prediction,
    Trajectory,
)
from mmspec.targets.stop import Stop
from mmspec.verifiers.coupled import Coupled
from mmspec.verifiers.reflection import Reflection
from tests.chains import mixture, vp_grid

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Steep:
    """A cheap denoiser with a steep slope: its output depends strongly on the noise of a state."""

    kernel: GaussianKernel
    width: int = 1

    def predict(self, states: Tensor, step: Tensor, row: Tensor) -> Prediction:
        return Prediction(2 * states + torch.sin(states.flip(-1)))


@dataclass(frozen=True)
class Varying:
    """As steep, with a predicted std: the kernel's, times a function of the state."""

    kernel: GaussianKernel
    width: int = 1

    def predict(self, states: Tensor, step: Tensor, row: Tensor) -> Prediction:
        std = (1.1 + 0.3 * torch.tanh(states)) * self.kernel.std_at(step, states)
        return Prediction(2 * states + torch.sin(states.flip(-1)), std)


@dataclass(frozen=True)
class Run:
    """The output of a run, and its cost."""

    states: Tensor  # (B, N + 1, d), the start first
    calls: int
    rounds: list[Round]
    drafts: list[Draft]
    target: ChainTarget
    context: Trajectory  # as it began; what it knows is that of the end

    @property
    def speedup(self) -> float:
        return (self.states.shape[1] - 1) / self.calls

    @property
    def rows(self) -> int:
        return self.context.known.rows


def denoiser(n: int, d: int = 2, components: int = 4, std: float = 0.3) -> Denoiser:
    """An ideal denoiser on the DDPM grid."""
    kernel = GaussianKernel.ancestral(*vp_grid(n, "linear"))
    return mixture(d, components, 0, std=std).denoiser(kernel)


def run(
    drafter: Any,
    network: Denoiser,
    verifier: Verifier | None = None,
    *,
    shape: Sequence[int] = (2,),
    batch: int = 1,
    seed: int = 0,
    row_ids: Sequence[int] | None = None,
    max_rows: int | None = None,
) -> Run:
    """Decode chains of `network`; a drafter that fails raises."""
    noise = KeyedNoise.from_seed(seed, batch, CPU, row_ids)
    start = noise.shared_keys(torch.zeros(batch, 1, dtype=torch.int64)).normal(*shape)[:, 0]
    spy, target = Spy(drafter), ChainTarget(network, max_rows)
    steps = network.kernel.num_steps
    parts = Parts(target, spy, verifier or Reflection(), Stop(steps))
    rounds = list(decode(parts, ChainRequest(start, noise)))
    assert not [round_.fallback for round_ in rounds if round_.fallback]
    chains = [
        torch.stack([start[row], *(x for round_ in rounds for x in round_.tokens[row])])
        for row in range(batch)
    ]
    assert spy.context is not None
    calls = sum(round_.calls for round_ in rounds)
    return Run(torch.stack(chains), calls, rounds, spy.drafts, target, spy.context)


def plain(network: Denoiser, **settings: Any) -> Run:
    """Sequential sampling, one state per call of the network."""
    return run(NoDraft(), network, Coupled(), **settings)


class Spy(Drafter):
    """Forwards everything and records the drafts."""

    def __init__(self, drafter: Drafter) -> None:
        self.inner, self.drafts = drafter, list[Draft]()
        self.context: Trajectory | None = None

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return self.inner.kinds

    def begin(self, context: Trajectory) -> Any:
        self.context = context
        return self.inner.begin(context)

    def propose(self, context: Trajectory, state: Any) -> Draft:
        self.drafts.append(self.inner.propose(context, state))
        return self.drafts[-1]

    def observe(
        self, context: Trajectory, state: Any, draft: Draft, scores: Scores, round_: Round
    ) -> Any:
        return self.inner.observe(context, state, draft, scores, round_)


def surprise(done: Run) -> float:
    """The largest of some z-scores of the chains' increments, in absolute value.

    Standardised by the target's own mean, the increments of an exact sampler are independent
    standard normals, whatever came before. Tested are their mean and variance along a direction
    that only the past decides (the one in which predictions change, where couplings act), their
    mean and size in all directions, and whether neighbours are correlated; pooled over all steps.
    Each score is asymptotically N(0, 1): the largest exceeds 4.5 once in 25,000 runs.
    """
    kernel, states = done.target.denoiser.kernel, done.states.double()
    random = [step for step, draws in enumerate(kernel.is_random) if draws]
    steps = torch.tensor(random).expand(len(states), -1)  # (B, M)
    rows = torch.arange(len(states))[:, None].expand_as(steps)
    here, after = states[:, random], states[:, [step + 1 for step in random]]
    seen = done.target.denoiser.predict(here.flatten(0, 1), steps.flatten(), rows.flatten())
    clean = seen.clean.view_as(here)
    before = torch.cat((clean[:, :1], clean[:, :-1]), 1)  # steps without noise come last
    clean = kernel.extrapolate(clean, before, steps)
    std = kernel.std_at(steps, here) if seen.std is None else seen.std.view_as(here)
    noise = (after - kernel.mean(here, clean, steps)) / std
    turn = (clean[:, 1:] - clean[:, :-1]).flatten(2)
    noise, d = noise.flatten(2), noise.flatten(2).shape[-1]
    along = (noise[:, 1:] * turn).sum(-1) / turn.norm(dim=-1).clamp_min(1e-12)
    neighbours = (noise[:, 1:] * noise[:, :-1]).sum(-1)
    scores = [
        along.sum() / along.numel() ** 0.5,
        (along**2 - 1).sum() / (2 * along.numel()) ** 0.5,
        noise.sum() / noise.numel() ** 0.5,
        (noise**2 - 1).sum() / (2 * noise.numel()) ** 0.5,
        neighbours.sum() / (neighbours.numel() * d) ** 0.5,
        (along[:, 1:] * along[:, :-1]).sum() / along[:, 1:].numel() ** 0.5,
    ]
    return max(abs(float(score)) for score in scores)


def distance(left: Tensor, right: Tensor) -> float:  # (n,), (n,)
    """Kolmogorov and Smirnov's, times (n / 2)^.5: above 2.3 with probability 5e-5 by chance."""
    both = torch.cat((left, right)).sort().values
    levels = [torch.searchsorted(one.sort().values, both, right=True) for one in (left, right)]
    gap = (levels[0] / len(left) - levels[1] / len(right)).abs().max()
    return float(gap * (len(left) / 2) ** 0.5)
