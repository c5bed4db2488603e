"""Randomness as a pure function of (seed, row, position).

It is the same for every device, batch and draft. A counter-based generator (the SplitMix64
finaliser) hashes integer keys into uniforms, so there is no state, rows are independent, and the
token at a position does not depend on how it was drafted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB
AHEAD = 32  # rounds or positions whose numbers are computed at once,
MAX_AHEAD = 1 << 20  # if there are no more numbers than this
LEVELS = 16  # of most trees
_ROUNDS = 0x5BD1E9955BD1E995  # separates rounds from seeds, which are small numbers too


class Lane(IntEnum):
    """Independent streams within one round."""

    DRAFT = 1  # samples of the drafter
    ACCEPT = 2  # acceptance tests
    RESIDUAL = 3  # corrections and bonus tokens
    OTHER = 4  # recipes; keys from here on are free
    WALK = 1 << 32  # the steps of a verifier, one lane each; keys from here on are reserved


Flips = Callable[[tuple[int, ...], Tensor], Tensor]  # index, probability (B,) -> (B,) bool


class Noise(Protocol):
    """The source of randomness of drafters and verifiers."""

    def shared_keys(self, position: Tensor) -> Keys: ...  # (B, M) -> the same in every round
    def fresh_keys(self, lane: int, index: Tensor) -> Keys: ...  # (B, M) or (M,), of this round
    def flip(self, probability: Tensor, lane: int) -> Tensor: ...  # (B, ...) -> bool, True w.p. it
    def prepare_flips(self, lanes: Tensor) -> Flips: ...  # `flip` on many lanes at once
    def pick(self, weights: Tensor, lane: int) -> Tensor: ...  # (B, V), non-negative -> (B,)
    def choose(self, survival: Tensor, level: Tensor, count: int, lane: int) -> Tensor:
        """(B, M, C), not increasing along C -> (B, M): k w.p. survival[k - 1] - survival[k].

        `level` (M, 1) or (B, M, 1) is below `count`; entries of one level share their random
        number, of lane `lane + level`.
        """
        ...

    def position_gumbel(self, lengths: tuple[int, ...], count: int, size: int) -> Tensor:
        """Gumbel noise (B, count, size) of `shared_keys` of `count` positions from `lengths` on."""
        ...

    def fresh_gumbel(self, lane: int, count: int, size: int) -> Tensor:
        """Gumbel noise (B, count, size) of `fresh_keys` of the first `count` indices."""
        ...

    def fresh_uniform(self, lane: int, count: int, size: int) -> Tensor:
        """Uniform numbers (B, count, size) of the same keys."""
        ...


@dataclass(frozen=True)
class Keys:
    """One key per sample; each gives events of any shape."""

    key: Tensor  # (...) int64

    def uniform(self, *event: int) -> Tensor:  # (..., *event) in (0, 1), as wide as the device has
        if not event:
            return _unit(_hash(self.key))
        numbers = _unit(_hash(self.key[..., None] + _offsets(math.prod(event), self.key.device)))
        return numbers if len(event) == 1 else numbers.reshape(*self.key.shape, *event)

    def gumbel(self, size: int) -> Tensor:  # (..., size) float32
        """Standard Gumbel noise. Its upper tail comes from small uniforms, which are precise."""
        return torch.log1p(self.uniform(size).neg_()).neg_().log_().neg_().float()

    def normal(self, *event: int) -> Tensor:  # (..., *event) float32
        """Standard normal noise by the inverse distribution function."""
        normal: Tensor = torch.special.ndtri(self.uniform(*event))
        return normal.float()

    def split(self, index: int) -> Keys:
        """An independent set of keys, for a second sample."""
        return Keys(_hash(self.key ^ _fold(index)))

    def extend(self, parents: Tensor, tokens: Tensor) -> Keys:  # (..., n) each
        """The keys of paths that extend those of `parents` by a token; independent of each other.

        A path has the same key whatever its place is.
        """
        return Keys(_hash(self.key.gather(-1, parents.long()) ^ _hash(tokens.long())))


@dataclass(frozen=True)
class KeyedNoise:
    """The noise of one `generate` call; each round has its own lanes (`at_round`).

    Rows that join a running batch count their rounds from `starts`, so that their noise is that of
    the same request alone.
    """

    rows: Tensor  # (B,) int64, seed and row id hashed together
    round: int = 0
    starts: Tensor | None = None  # (B,) int64 round of the batch that is each row's round 0
    tables: dict[Any, tuple[Any, ...]] = field(  # rows and starts, and their numbers to come
        default_factory=dict, compare=False, repr=False
    )
    num_ahead: int = AHEAD  # rounds whose numbers are drawn at once

    @classmethod
    def from_seed(
        cls, seed: int, batch: int, device: torch.device, row_ids: Sequence[int] | None = None
    ) -> KeyedNoise:
        """Key every row by `seed` and its id: its index, or its entry of `row_ids`."""
        ids = list(range(batch)) if row_ids is None else list(row_ids)
        if len(ids) != batch:
            raise ValueError(f"row_ids has {len(ids)} entries for {batch} rows; give one per row")
        own = _scalar_hash(int(seed))  # products of numpy integers would overflow
        rows = torch.tensor([_scalar_hash(own + int(row)) for row in ids], device=device)
        return cls(rows)

    def at_round(self, index: int) -> KeyedNoise:
        return replace(self, round=index)

    def join(self, other: KeyedNoise, shift: int) -> KeyedNoise:
        """The noise of these rows and those of `other`, whose round 0 is round `shift` here."""
        starts = torch.zeros_like(self.rows) if self.starts is None else self.starts
        theirs = torch.zeros_like(other.rows) if other.starts is None else other.starts
        return KeyedNoise(
            torch.cat((self.rows, other.rows)), self.round, torch.cat((starts, theirs + shift))
        )

    def select(self, rows: Tensor) -> KeyedNoise:  # (n,)
        """The noise of some rows."""
        return replace(
            self,
            rows=self.rows[rows],
            starts=None if self.starts is None else self.starts[rows],
        )

    def shared_keys(self, position: Tensor) -> Keys:  # (B, M)
        return Keys(_hash(self.rows[:, None] ^ (position * _GOLDEN)))

    def fresh_keys(self, lane: int, index: Tensor) -> Keys:  # (B, M) or (M,)
        return Keys(_hash((self.rows ^ self._salt(lane))[:, None] + index * _GOLDEN))

    def flip(self, probability: Tensor, lane: int) -> Tensor:
        return self._own(lane).uniform(*probability.shape[1:]) < probability

    def prepare_flips(self, lanes: Tensor) -> Flips:
        salts = _hash(lanes[..., None] + self._round_key())
        uniform = Keys(_hash(salts ^ self.rows)).uniform()  # (*lanes, B)
        return lambda place, probability: uniform[place] < probability

    def pick(self, weights: Tensor, lane: int) -> Tensor:
        uniform = self._uniforms(lane, 1)
        own = uniform if uniform.shape[1] == 1 else uniform[:, :1]
        return quantile(weights, own).squeeze(1)

    def choose(self, survival: Tensor, level: Tensor, count: int, lane: int) -> Tensor:
        uniform = self._uniforms(lane, count)
        if level.dim() == 2:
            own = uniform[:, level]
        else:
            own = uniform.gather(1, level.squeeze(2))[..., None]
        return (own < survival).sum(-1)

    def position_gumbel(self, lengths: Any, count: int, size: int) -> Tensor:
        if isinstance(lengths, Tensor):  # (B, 1), inside a compiled graph, which keeps no table
            steps = torch.arange(count, device=lengths.device)
            return self.shared_keys(lengths + steps).gumbel(size)
        key = ("positions", size)
        starts, table = self._recall(key)
        offsets = (
            []
            if table is None
            else [now - start for now, start in zip(lengths, starts, strict=True)]
        )
        if table is None or min(offsets) < 0 or max(offsets) + count > table.shape[1]:
            ahead = max(count, min(AHEAD, MAX_AHEAD // (len(lengths) * size)))
            first = torch.tensor(lengths, device=self.rows.device)[:, None]
            position = first + torch.arange(ahead, device=first.device)
            table = self.shared_keys(position).gumbel(size)
            self.tables[key] = self.rows, self.starts, lengths, table
            offsets = [0] * len(lengths)
        known: Tensor = table
        if min(offsets) == max(offsets):
            return known.narrow(1, offsets[0], count)
        index = torch.tensor(offsets, device=table.device)[:, None]
        index = index + torch.arange(count, device=index.device)
        return known[torch.arange(len(index), device=index.device)[:, None], index]

    def fresh_gumbel(self, lane: int, count: int, size: int) -> Tensor:
        return self._fresh(Keys.gumbel, lane, count, size)

    def fresh_uniform(self, lane: int, count: int, size: int) -> Tensor:
        return self._fresh(Keys.uniform, lane, count, size)

    def _fresh(
        self, draw: Callable[[Keys, int], Tensor], lane: int, count: int, size: int
    ) -> Tensor:
        rounds = max(1, min(self.num_ahead, MAX_AHEAD // (len(self.rows) * count * size)))

        def draw_ahead(first: int) -> dict[Any, Tensor]:  # (rounds, B, count, V)
            index = torch.arange(count, device=self.rows.device) * _GOLDEN
            salts = self._round_salts(first, rounds, [lane])[..., 0]
            keys = Keys(_hash((self.rows ^ salts)[..., None] + index))
            return {(draw, lane, count, size): draw(keys, size)}

        return self._of_this_round((draw, lane, count, size), draw_ahead)

    def _uniforms(self, lane: int, count: int) -> Tensor:  # (B, 1), or (B, count or more)
        """One number for each of `count` lanes; others may follow them."""
        if (lane == Lane.WALK and count <= LEVELS) or (lane == Lane.RESIDUAL and count == 1):
            return self._of_this_round((lane, "usual"), self._draw_usual)

        def draw(first: int) -> dict[Any, Tensor]:
            return {(lane, count): self._draw_uniforms(range(lane, lane + count), first)}

        return self._of_this_round((lane, count), draw)

    def _draw_usual(self, first: int) -> dict[Any, Tensor]:
        """Those of most verdicts, drawn together."""
        lanes = (*range(Lane.WALK, Lane.WALK + LEVELS), Lane.RESIDUAL)
        walk, residual = self._draw_uniforms(lanes, first).split([LEVELS, 1], -1)
        return {(Lane.WALK, "usual"): walk, (Lane.RESIDUAL, "usual"): residual}

    def _draw_uniforms(self, lanes: Sequence[int], first: int) -> Tensor:  # (rounds, B, lanes)
        salts = self._round_salts(first, self.num_ahead, lanes)
        return Keys(_hash(salts ^ self.rows[:, None])).uniform()

    def _of_this_round(self, key: Any, draw: Callable[[int], dict[Any, Tensor]]) -> Tensor:
        """An entry of a table (rounds, ...); `draw` makes tables from its first round on."""
        first, table = self._recall(key)
        if table is None or not 0 <= self.round - first < len(table):
            for name, made in draw(self.round).items():
                self.tables[name] = self.rows, self.starts, self.round, made.unbind(0)
            first, table = self._recall(key)
        found: Tensor = table[self.round - first]
        return found

    def _recall(self, key: Any) -> tuple[Any, Any]:
        """Where a table of these rows begins, and the table; None if there is none."""
        rows, starts, first, table = self.tables.get(key, (None, None, 0, None))
        is_own = rows is self.rows and starts is self.starts
        return (first, table) if is_own else (0, None)

    def _round_salts(self, first: int, count: int, lanes: Sequence[int]) -> Tensor:
        """`_salt` of several rounds and lanes: (count, 1 or B, lanes)."""
        rounds = torch.arange(first, first + count, device=self.rows.device)[:, None]
        own = rounds if self.starts is None else rounds - self.starts
        places = torch.tensor(lanes, device=self.rows.device)
        return _hash(_hash(own ^ _ROUNDS)[..., None] + places)

    def _own(self, lane: int) -> Keys:  # (B,)
        """One key per row."""
        return Keys(_hash(self.rows ^ self._salt(lane)))

    def _salt(self, lane: int) -> int | Tensor:  # a number, or (B,)
        key = self._round_key() + lane
        return _fold(key) if isinstance(key, int) else _hash(key)

    def _round_key(self) -> int | Tensor:  # a number, or (B,) where rows count from other rounds
        if self.starts is None:
            return _fold(self.round ^ _ROUNDS)
        return _hash((self.round - self.starts) ^ _ROUNDS)


def quantile(weights: Tensor, uniform: Tensor) -> Tensor:  # (..., V), (..., C) -> (..., C)
    """The tokens at these quantiles: sampling by the inverse distribution function.

    Weights need not be normalised. Cheaper than Gumbel noise where no coupling is needed.
    """
    wide = max(weights.dtype, uniform.dtype, key=lambda dtype: dtype.itemsize)
    mass = weights.cumsum(-1, dtype=wide)
    place = uniform * mass[..., -1:]
    if place.shape[:-1] != mass.shape[:-1]:
        place = place.expand(*mass.shape[:-1], -1).contiguous()
    return torch.searchsorted(mass, place, right=True).clamp_max(weights.shape[-1] - 1)


@lru_cache(maxsize=16)
def _offsets(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device) * _GOLDEN


def _hash(key: Tensor) -> Tensor:
    key = key + _GOLDEN  # from here on in place
    key ^= (key >> 30).bitwise_and_(0x3FFFFFFFF)  # masked, because >> keeps the sign
    key *= _MIX1
    key ^= (key >> 27).bitwise_and_(0x1FFFFFFFFF)
    key *= _MIX2
    key ^= (key >> 31).bitwise_and_(0x1FFFFFFFF)
    return key


def _unit(key: Tensor) -> Tensor:
    """Uniforms of 53 bits in float64; in float32, 24 bits of precision at any size above 2^-54."""
    bits = (key >> 11).bitwise_and_(0x1FFFFFFFFFFFFF)
    if has_float64(key.device):
        return bits.double().add_(0.5).mul_(2.0**-53)
    return bits.float().add_(0.5).mul_(2.0**-53).clamp_max_(1 - 2.0**-24)


_FLOAT64: dict[str, bool] = {}  # by type of device


def has_float64(device: torch.device) -> bool:
    """Whether tensors of a device can be float64, found by making one: not on Apple's GPUs."""
    if device.type not in _FLOAT64:
        try:
            torch.ones((), dtype=torch.float64, device=device)
        except (TypeError, RuntimeError):
            _FLOAT64[device.type] = False
        else:
            _FLOAT64[device.type] = True
    return _FLOAT64[device.type]


def _scalar_hash(value: int) -> int:
    wide = value & 0xFFFFFFFFFFFFFFFF
    wide = (wide + (_GOLDEN & 0xFFFFFFFFFFFFFFFF)) & 0xFFFFFFFFFFFFFFFF
    wide = ((wide ^ (wide >> 30)) * (_MIX1 & 0xFFFFFFFFFFFFFFFF)) & 0xFFFFFFFFFFFFFFFF
    wide = ((wide ^ (wide >> 27)) * (_MIX2 & 0xFFFFFFFFFFFFFFFF)) & 0xFFFFFFFFFFFFFFFF
    wide ^= wide >> 31
    return wide - (1 << 64) if wide >= 1 << 63 else wide


def _fold(index: int) -> int:
    return _scalar_hash(index)


def fresh_seed(moves: bool = True) -> int:
    """A seed from torch's own generator: `torch.manual_seed` reproduces a call without one.

    `moves` is whether that generator moves on, as it does in the model's own sampling only.
    """
    generator = torch.default_generator if moves else torch.default_generator.clone_state()
    return int(torch.randint(2**62, (), generator=generator))
