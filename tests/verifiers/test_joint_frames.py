"""Verifiers of frames: exact by enumeration, and the acceptance of one ratio per frame."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import KeyedNoise, Keys
from mmspec.draft import Draft, Kind, Scores, Verifier
from mmspec.targets.frames.frame_distributions import (
    FREE,
    DepthDistribution,
    FrameDistribution,
    ParallelDistribution,
)
from mmspec.verifiers.coupled import Coupled
from mmspec.verifiers.coupled_frames import CoupledFrames
from mmspec.verifiers.depth_frames import DepthFrames
from mmspec.verifiers.enumeration import ScriptedNoise
from mmspec.verifiers.joint_frames import JointFrames, acceptance, thinning_probability

BOOKS, CODES, DEPTH = 2, 2, 3  # frames of two codes, and three frames
EVERY = torch.tensor(list(product(range(CODES), repeat=BOOKS)))  # (F, K)
FRAMES = len(EVERY)


@dataclass(frozen=True)
class TableDecoder:
    """A depth decoder with a table (states, code of book 0) -> distribution of book 1."""

    table: Tensor  # (S, V, V) float64

    def distributions(self, states: Tensor, codes: Tensor) -> Categorical:
        return Categorical.from_weights(self.table[states[:, 0].long(), codes[:, 0]][:, None])

    def begin(self, states: Tensor) -> Tensor:
        return states[:, 0].long()

    def step(self, memory: Tensor, code: Tensor) -> Categorical:
        return Categorical.from_weights(self.table[memory, code])


@dataclass(frozen=True)
class Toy:
    """Distributions of frames after every prefix of frames, indexed in base F, per depth."""

    first: list[Tensor]  # (F ** depth, V)
    rest: list[Tensor]  # (F ** depth, V, V): of book 1 given book 0
    is_parallel: bool
    hidden: bool = False  # whether book 1 is forced

    @classmethod
    def random(cls, seed: int, is_parallel: bool, hidden: bool = False) -> Toy:
        noise = torch.Generator().manual_seed(seed)
        first, rest = [], []
        for depth in range(DEPTH):
            shape = (FRAMES**depth, CODES)
            first.append(torch.rand(shape, generator=noise, dtype=torch.float64) + 0.1)
            table = torch.rand(*shape, CODES, generator=noise, dtype=torch.float64) + 0.1
            rest.append(table[:, :1].expand(-1, CODES, -1) if is_parallel else table)
        normal = [table / table.sum(-1, keepdim=True) for table in first]
        others = [table / table.sum(-1, keepdim=True) for table in rest]
        return cls(normal, others, is_parallel, hidden)

    def distribution(self, depth: int, prefix: Tensor) -> FrameDistribution:  # (R,) -> batch (R,)
        if not self.is_parallel:
            decoder = TableDecoder(self.rest[depth])
            first = Categorical.from_weights(self.first[depth][prefix])
            return DepthDistribution(first, prefix[:, None].double(), decoder, BOOKS)
        codes = torch.stack((self.first[depth][prefix], self.rest[depth][prefix, 0]), 1)
        fixed = torch.tensor([FREE, 1 if self.hidden else FREE]).expand(len(prefix), -1)
        return ParallelDistribution(Categorical.from_weights(codes), fixed)

    def masses(self, depth: int) -> Tensor:  # (F ** depth, F): probabilities of frames
        every = torch.arange(FRAMES**depth)
        found = []
        for frame in EVERY:
            distribution = self.distribution(depth, every)
            frames = frame.expand(len(every), -1)
            found.append(distribution.log_prob(frames).exp())
        return torch.stack(found, -1)

    def joint(self) -> Tensor:  # (F ** DEPTH,)
        mass = torch.ones(1, dtype=torch.float64)
        for depth in range(DEPTH):
            mass = (mass[:, None] * self.masses(depth)).flatten()
        return mass


def number(frames: Tensor) -> Tensor:  # (..., K) -> (...)
    return frames[..., 0] * CODES + frames[..., 1]


def drafts(q: Toy) -> tuple[Tensor, Tensor, list[Tensor]]:
    """All chains of two frames (R, 2, K), their probabilities, and the prefixes behind each."""
    pairs = torch.tensor(list(product(range(FRAMES), repeat=2)))
    weight = q.masses(0)[0, pairs[:, 0]] * q.masses(1)[pairs[:, 0], pairs[:, 1]]
    likely = weight > 0
    pairs = pairs[likely]
    prefixes = [torch.zeros_like(pairs[:, 0]), pairs[:, 0], pairs[:, 0] * FRAMES + pairs[:, 1]]
    return EVERY[pairs], weight[likely], prefixes


def stack_prefixes(toy: Toy, prefixes: list[Tensor]) -> FrameDistribution:
    """Batch (R, M), of prefixes of 0, 1, ... frames."""
    distributions: list[Any] = [
        toy.distribution(depth, prefix) for depth, prefix in enumerate(prefixes)
    ]
    if toy.is_parallel:
        codes = Categorical.stack([distribution.codes for distribution in distributions])
        return ParallelDistribution(
            codes, torch.stack([distribution.fixed_codes for distribution in distributions], 1)
        )
    starts = [sum(FRAMES**depth for depth in range(upto)) for upto in range(len(distributions))]
    states = [prefix + start for prefix, start in zip(prefixes, starts, strict=True)]
    first = Categorical.stack([distribution.first for distribution in distributions])
    decoder = TableDecoder(torch.cat(toy.rest))
    return DepthDistribution(first, torch.stack(states, 1)[..., None].double(), decoder, BOOKS)


def record_distributions(q: Toy, tokens: Tensor, prefixes: list[Tensor]) -> ParallelDistribution:
    """The distributions that the codes of a draft were sampled from, (R, N)."""
    distributions = [q.distribution(depth, prefix) for depth, prefix in enumerate(prefixes[:-1])]
    codes = [
        distribution.code_distributions(tokens[:, depth])
        for depth, distribution in enumerate(distributions)
    ]
    forced = torch.stack([distribution.fixed_codes for distribution in distributions], 1)
    return ParallelDistribution(Categorical.stack(codes), forced)


def enumerate_frames(p: Toy, q: Toy, verifier: Verifier, real: int = 2) -> Tensor:  # (F ** DEPTH,)
    """The distribution of three frames that one round emits, completed by the target.

    Of the two drafted frames the first `real` are no padding.
    """
    tokens, weight, prefixes = drafts(q)
    draft = Draft.chain(tokens, Kind.IID, record_distributions(q, tokens, prefixes))
    draft = replace(draft, mask=(torch.arange(2) < real).expand(len(tokens), -1))
    scores = Scores(stack_prefixes(p, prefixes), torch.arange(3).expand(len(tokens), -1))
    masses = [torch.zeros(FRAMES**depth, dtype=torch.float64) for depth in range(DEPTH + 1)]
    origin = torch.arange(len(tokens))
    script, chance = (
        torch.empty(len(tokens), 0, dtype=torch.int64),
        torch.ones(len(tokens)).double(),
    )
    slots: dict[tuple[int, int], int] = {}
    while len(origin):
        noise = ScriptedNoise(script, chance, slots)
        some = replace(draft, tokens=tokens[origin], parents=draft.parents[origin])
        some = replace(some, mask=draft.mask[origin], distribution=draft.distribution[origin])  # type: ignore[index]
        verdict = verifier.verify(
            some, Scores(scores.distribution[origin], scores.position[origin]), noise
        )
        assert verdict.next is not None
        assert torch.equal((verdict.path >= 0).sum(-1), verdict.length)
        share, said = weight[origin] * noise.chance, number(tokens[origin])
        code = torch.zeros_like(origin)
        for step in range(2):
            code = torch.where(verdict.length > step, code * FRAMES + said[:, step], code)
        code = code * FRAMES + number(verdict.next)
        for length in range(DEPTH):
            here = verdict.length == length
            masses[length + 1].index_add_(0, code[here], share[here])
        if not noise.branches:
            break
        width = len(slots)
        pad = torch.nn.functional.pad
        told = [pad(way, (0, width - way.shape[1]), value=-1) for _, way, _ in noise.branches]
        origin = origin[torch.cat([rows for rows, _, _ in noise.branches])]
        script, chance = torch.cat(told), torch.cat([part for _, _, part in noise.branches])
    for length in range(1, DEPTH):
        masses[length + 1] += (masses[length][:, None] * p.masses(length)).flatten()
    return masses[-1]


class Written(JointFrames):
    """The same with its residual written out over all frames, so that it can be counted.

    What thins the target's frames is the verifier's own `keep`; a frame of the loop has the
    distribution p(y) (1 - Q(y) / P(y))+, normalised.
    """

    def _residual(
        self, p: FrameDistribution, q: FrameDistribution, refused: Tensor, noise: Any
    ) -> Tensor:
        weights = []
        for frame in EVERY:
            frames = frame.expand(len(refused), -1)
            mass = p.log_prob(frames).exp()
            weight = mass * torch.where(refused, thinning_probability(p, q, frames), 1.0)
            weights.append(torch.where(mass > 0, weight, 0.0))
        return EVERY[noise.pick(torch.stack(weights, -1), 4)]


@pytest.mark.parametrize(
    ("is_parallel", "hidden"),
    [(True, False), (True, True), (False, False)],  # a depth decoder forces nothing
    ids=["delay", "delay-forced", "depth"],
)
def test_codes_one_by_one_are_exact(is_parallel: bool, hidden: bool) -> None:
    p, q = Toy.random(0, is_parallel, hidden), Toy.random(1, is_parallel, hidden)
    for real in (2, 1):
        found = enumerate_frames(p, q, DepthFrames(), real)
        torch.testing.assert_close(found, p.joint(), atol=1e-12, rtol=0)


FORCED = {  # in the target, in the draft: an end of speech need not be in both
    "free": (False, False),
    "forced": (True, True),
    "forced by the target": (True, False),
    "forced by the drafter": (False, True),
}


@pytest.mark.parametrize("verifier", [Written(), DepthFrames()], ids=["joint", "by codes"])
@pytest.mark.parametrize("case", FORCED)
def test_codes_that_are_forced_are_exact(case: str, verifier: Verifier) -> None:
    p, q = (Toy.random(seed, True, hidden) for seed, hidden in enumerate(FORCED[case]))
    for real in (2, 1):
        found = enumerate_frames(p, q, verifier, real)
        torch.testing.assert_close(found, p.joint(), atol=1e-12, rtol=0)


def chi_square(frames: Tensor, wanted: Tensor) -> float:  # (R, K), (F,) -> the statistic
    counts = torch.bincount(number(frames), minlength=FRAMES).double()
    wanted = len(frames) * wanted / wanted.sum()
    possible = wanted > 0
    assert counts[~possible].sum() == 0
    return float(((counts - wanted)[possible] ** 2 / wanted[possible]).sum())


def test_a_round_without_a_draft_samples_the_target() -> None:
    p = Toy.random(0, True)
    zero = torch.zeros(4000, dtype=torch.int64)
    scores = Scores(stack_prefixes(p, [zero]), zero[:, None])
    draft, noise = Draft.empty(4000, zero.device), KeyedNoise.from_seed(0, 4000, zero.device)
    for verifier in (JointFrames(), DepthFrames(), CoupledFrames()):
        verdict = verifier.verify(draft, scores, noise)
        assert verdict.next is not None
        assert chi_square(verdict.next, p.masses(0)[0]) < 21.1  # a false-alarm rate of 1e-4
    coupled = p.distribution(0, zero).sample(Keys(noise.shared_keys(zero[:, None]).key[:, 0]))
    assert verdict.next is not None
    assert torch.equal(verdict.next, coupled)


def test_a_wrong_walk_is_convicted() -> None:
    """The residual of one code instead of the frame's is another distribution."""

    class Mixed(JointFrames):
        def _residual(
            self, p: FrameDistribution, q: FrameDistribution, refused: Tensor, noise: Any
        ) -> Tensor:
            blank = p.fixed_codes.clamp_min(0)
            left = p.code_distributions(blank).residual(q.code_distributions(blank)).probs
            own = p.code_distributions(blank).probs
            weights = torch.where(refused[:, None, None], left, own)
            return torch.stack([noise.pick(weights[:, k], 9 + k) for k in range(BOOKS)], -1)

    p, q = Toy.random(0, True), Toy.random(1, True)
    assert float((enumerate_frames(p, q, Mixed()) - p.joint()).abs().sum()) > 0.01


@pytest.mark.parametrize("seed", [2, 12, 22])
def test_the_thinned_frames_have_the_residual_distribution(seed: int) -> None:
    """The loop itself, against the closed form: a chi-square at a false-alarm rate of 1e-4."""
    p, q = Toy.random(seed, True), Toy.random(seed + 1, True)
    rows = 4000
    zero = torch.zeros(rows, dtype=torch.int64)
    noise = KeyedNoise.from_seed(0, rows, zero.device)
    drawn = JointFrames()._residual(
        p.distribution(0, zero), q.distribution(0, zero), zero == 0, noise
    )
    wanted = (p.masses(0)[0] - q.masses(0)[0]).clamp_min(0)
    assert chi_square(drawn, wanted) < 21.1  # three degrees of freedom at most


@dataclass(frozen=True)
class UsedLanes(KeyedNoise):
    """Keyed noise that refuses a lane that was used before."""

    used: list[int] = field(default_factory=list)

    def flip(self, probability: Tensor, lane: int) -> Tensor:
        self._use(lane)
        return super().flip(probability, lane)

    def pick(self, weights: Tensor, lane: int) -> Tensor:
        self._use(lane)
        return super().pick(weights, lane)

    def _use(self, lane: int) -> None:
        assert lane not in self.used, f"lane {lane} is used twice"
        self.used.append(lane)


@pytest.mark.parametrize("seed", range(4))
def test_no_two_draws_of_a_verdict_share_noise(seed: int) -> None:
    """A flip and a draw of one lane are dependent, which moves the residual by several percent."""
    p, q = Toy.random(seed, True), Toy.random(seed + 1, True)
    tokens, _, prefixes = drafts(q)
    draft = Draft.chain(tokens, Kind.IID, record_distributions(q, tokens, prefixes))
    scores = Scores(stack_prefixes(p, prefixes), torch.arange(3).expand(len(tokens), -1))
    noise = UsedLanes(KeyedNoise.from_seed(seed, len(tokens), tokens.device).rows)
    JointFrames().verify(draft, scores, noise)
    assert len(noise.used) > 8  # several frames were rejected


PAIR = (  # three books of six codes, p and q in thousandths
    (
        (109, 250, 219, 277, 142, 3),
        (406, 2, 114, 3, 194, 281),
        (54, 62, 564, 258, 45, 18),
    ),
    (
        (214, 18, 46, 183, 251, 288),
        (93, 7, 98, 1, 65, 736),
        (26, 264, 285, 39, 44, 342),
    ),
)


def test_codebook_by_codebook_accepts_less() -> None:
    """Whole frames pass with 0.262, and with 0.128 where every book has to pass by itself."""
    p, q = torch.tensor(PAIR, dtype=torch.float64)
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    every = torch.tensor(list(product(range(6), repeat=3)))
    fixed = torch.full((len(every), 3), FREE)
    distributions = [
        ParallelDistribution(Categorical.from_weights(one.expand(len(every), -1, -1)), fixed)
        for one in (p, q)
    ]
    drafted = distributions[1].log_prob(every).exp()
    joint = float((drafted * acceptance(distributions[0], distributions[1], every)).sum())
    single = float(torch.minimum(p, q).sum(-1).prod())
    assert (round(joint, 3), round(single, 3)) == (0.262, 0.128)


@pytest.mark.parametrize(
    ("is_parallel", "hidden"),
    [(True, False), (True, True), (False, False)],
    ids=["delay", "delay-forced", "depth"],
)
def test_coupled_frames_are_those_that_the_whole_distribution_draws(
    is_parallel: bool, hidden: bool
) -> None:
    """Code by code with kept prefixes, and frame by frame from scratch: the same verdicts."""
    p, q = Toy.random(4, is_parallel, hidden), Toy.random(5, is_parallel, hidden)
    tokens, _, prefixes = drafts(q)
    scores = Scores(stack_prefixes(p, prefixes), torch.arange(3).expand(len(tokens), -1))
    noise = KeyedNoise.from_seed(7, len(tokens), tokens.device, [0] * len(tokens))
    for real in (2, 1):
        mask = (torch.arange(2) < real).expand(len(tokens), -1)
        draft = Draft.chain(tokens, Kind.DET, mask=mask)
        one, other = (way.verify(draft, scores, noise) for way in (CoupledFrames(), Coupled()))
        assert one.length.tolist() == other.length.tolist()
        assert set(one.length.tolist()) == set(range(real + 1))
        assert one.path.tolist() == other.path.tolist()
        assert one.next is not None
        assert other.next is not None
        assert one.next.tolist() == other.next.tolist()
