"""Logits become distributions here and nowhere else, the same way for the target's p and the drafter's q.

Whatever transformers' `generate()` does to the logits of one step happens here to every node of a
draft at once: processors that look at the tokens before see each node's own path; warpers run on
all nodes together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    WatermarkLogitsProcessor,
)

from mmspec import _hf
from mmspec.distributions.categorical import Categorical
from mmspec.errors import check_flag, check_number, is_whole

Prefix = Callable[[int, int], Tensor]  # (row, place) -> (L,) int64: the tokens before that place


class PlaceProcessor(Protocol):
    """Changes scores by where their token will stand, for all nodes of a draft at once."""

    def __call__(self, scores: Tensor, position: Tensor) -> Tensor: ...  # (B, M, V), (B, M)


@dataclass(frozen=True)
class Sampling:
    """How logits become distributions.

    The order is that of `generate()`: `processors`, then temperature, top-k, top-p, min-p, typical,
    epsilon, eta. Greedy decoding (`do_sample=False`) runs the processors only. The neutral value of
    every other setting switches it off. `processors` are Hugging Face processors without a state of
    their own; one of your own making must not remember anything between calls, which cannot be
    checked here. `places` come before everything else and look at nothing but absolute positions.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    processors: tuple[LogitsProcessor, ...] = ()
    places: tuple[PlaceProcessor, ...] = ()

    def __post_init__(self) -> None:
        check_flag("do_sample", self.do_sample)
        check_number("temperature", self.temperature, -math.inf, 1e8)
        for name in ("top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"):
            check_number(name, getattr(self, name), example=0.9)
        if self.temperature == 0:
            raise ValueError(
                "temperature=0 divides by zero; use do_sample=False for greedy decoding"
            )
        if self.temperature < 1e-8:
            raise ValueError(
                f"temperature={self.temperature} is not a positive number; give one, 1.0 = off"
            )
        if not is_whole(self.top_k) or self.top_k < 0:
            raise ValueError(
                f"top_k={self.top_k!r} is not a whole number from 0 up; give one, 0 = off"
            )
        for name in ("top_p", "typical_p"):
            if not 0 < (value := getattr(self, name)) <= 1:
                raise ValueError(
                    f"{name}={value} is outside (0, 1]; give a share inside, 1.0 = off"
                )
        if not 0 <= self.min_p <= 1:
            raise ValueError(
                f"min_p={self.min_p} is outside [0, 1]; give a share inside, 0.0 = off"
            )
        for name in ("epsilon_cutoff", "eta_cutoff"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise ValueError(
                    f"{name}={value} is outside [0, 1); give a value inside, 0.0 = off"
                )
        for processor in self.processors:
            _refuse_stateful(processor)

    @classmethod
    def from_processors(cls, processors: Iterable[LogitsProcessor], do_sample: bool) -> Sampling:
        """Read a list as `generate()` builds it: our settings from its end, the rest kept in order.

        The trailing warpers become settings as long as they stand in the order above; from the
        first that does not on, everything before is kept as it is.
        """
        kept = list(processors)
        settings: dict[str, Any] = {}
        if do_sample:
            if kept and type(kept[-1]) is LogitNormalization:
                kept.pop()  # a distribution is normalised when asked
            rank = len(_WARPERS)
            while kept and (found := _as_setting(kept[-1], rank)) is not None:
                rank, name, value = found
                settings[name] = value
                kept.pop()
        return cls(do_sample=do_sample, processors=tuple(kept), **settings)

    @property
    def needs_prefix(self) -> bool:
        """Whether a distribution depends on the tokens before it."""
        return any(type(processor) not in _PREFIX_FREE for processor in self.processors)

    def distribution(
        self, logits: Tensor, prefix: Prefix | None = None, position: Tensor | None = None
    ) -> Categorical:
        """Distributions of batch shape (B, M) from logits (B, M, V), in float32, or float64 if given.

        `prefix(row, place)` are the tokens before that place as `generate()` shows them to
        processors, left padding of the prompt included. For a padded place any true prefix of the
        row will do. `position` (B, M) is where the tokens that the distributions speak of will
        stand, which
        `places` ask for.
        """
        scores = _widen(logits)
        for change in self.places:
            if position is None:
                raise ValueError(
                    f"{type(change).__name__} looks at positions; give distribution() some"
                )
            scores = change(scores, position)
        if self.processors:
            scores = self._process(scores, prefix)
        if self.do_sample and self._warpers:
            flat = scores.flatten(0, 1)
            for warper in self._warpers:
                flat = warper(_no_ids(flat), flat)
            scores = flat.view(scores.shape)
        return Categorical(scores, hard=not self.do_sample)

    @cached_property
    def _warpers(self) -> tuple[LogitsProcessor, ...]:
        """Hugging Face's own classes: they work row by row, so equality holds by construction."""
        return tuple(
            warper(int(value) if name == "top_k" else float(value))
            for name, (warper, _, off) in _WARPERS.items()
            if (value := getattr(self, name)) != off
        )

    def _process(self, scores: Tensor, prefix: Prefix | None) -> Tensor:  # (B, M, V) -> (B, M, V)
        batch, places, _ = scores.shape
        paths: list[Tensor] = []
        groups: list[_Group] = []
        if self.needs_prefix:
            if prefix is None:
                names = sorted({type(p).__name__ for p in self.processors} - _NAMES_PREFIX_FREE)
                raise ValueError(
                    f"{', '.join(names)} look at the tokens before; give distribution() a prefix"
                )
            paths = [
                prefix(row, place).to(scores.device)
                for row in range(batch)
                for place in range(places)
            ]
            row_bound = not all(_ignores_rows(p) for p in self.processors)
            groups = _group(paths, batch, row_bound)
        flat = scores.flatten(0, 1)
        for processor in self.processors:
            if type(processor) in _PREFIX_FREE:
                flat = processor(_no_ids(flat), flat)
            elif type(processor) is PrefixConstrainedLogitsProcessor:
                flat = _run_by_place(processor, flat, paths, places)
            else:
                flat = _run_grouped(processor, flat, groups)
        return flat.view(scores.shape)


def guide(cond: Tensor, uncond: Tensor | None, scale: float) -> Tensor:  # (..., V) x2 -> (..., V)
    """Classifier-free guidance of two branches scored in one doubled batch (Ho and Salimans 2022).

    u + s (c - u) on raw logits, before every processor. Taking logarithms of probabilities first
    (Sanchez et al. 2023) moves all scores of a place by one number, so the distribution is the
    same. `scale` 1 is no guidance: the second branch is not looked at and may be None.
    """
    if scale == 1:
        return cond
    if uncond is None:
        raise ValueError(
            f"guidance scale {scale} needs the unconditional logits; pass them, or scale=1"
        )
    c, u = _widen(cond), _widen(uncond)
    return u + (c - u) * scale


@dataclass(frozen=True)
class _Group:
    """One call of a prefix-dependent processor."""

    ids: Tensor  # (R, L) prefixes of equal length
    places: Tensor  # (R,) the flat places whose scores go with them
    keep: Tensor | None  # which of the R answers count; None = all


def _group(paths: list[Tensor], batch: int, row_bound: bool) -> list[_Group]:
    """Put the B * M places, row by row, into calls of equal prefix length.

    A processor that knows its rows (a prompt length per row, a batch index) must see row b at index
    b: then a call holds one place of every row, and the rows of another length are fillers (cut,
    where longer).
    """
    everything = range(len(paths))
    count = len(paths) // batch
    sets = [everything[place::count] for place in range(count)] if row_bound else [everything]
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
            groups.append(_Group(ids, torch.tensor(called, device=ids.device), keep))
    return groups


def _run_grouped(processor: LogitsProcessor, flat: Tensor, groups: list[_Group]) -> Tensor:
    out = torch.empty_like(flat)
    for group in groups:
        # indexing copies: a processor that writes in place spoils nothing
        answer = processor(group.ids, flat[group.places])
        if group.keep is None:
            out[group.places] = answer
        else:
            out[group.places[group.keep]] = answer[group.keep]
    return out


def _run_by_place(
    processor: PrefixConstrainedLogitsProcessor, flat: Tensor, paths: list[Tensor], places: int
) -> Tensor:
    """A user's grammar is asked about true prefixes only, never about a filler."""
    answers = [
        _hf.bind_row(processor, index // places)(path[None], flat[index : index + 1])
        for index, path in enumerate(paths)
    ]
    return torch.cat(answers)


def _no_ids(flat: Tensor) -> Tensor:  # (R, V) -> (R, 0)
    return torch.empty(flat.shape[0], 0, dtype=torch.int64, device=flat.device)


def _widen(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _as_setting(processor: LogitsProcessor, rank: int) -> tuple[int, str, Any] | None:
    """The setting that a warper of rank below `rank` stands for; None where there is none."""
    state = vars(processor)
    if state.get("filter_value", -float("inf")) != -float("inf"):
        return None
    if state.get("min_tokens_to_keep", 1) != 1:
        return None
    for index, (name, (warper, attribute, _)) in enumerate(_WARPERS.items()):
        if type(processor) is warper and index < rank:
            value = state[attribute]
            if name == "top_p" and value == 0:
                return None  # Hugging Face takes it for "the best token only"
            return index, name, value if name == "top_k" else float(value)
    return None


def _ignores_rows(processor: LogitsProcessor) -> bool:
    """Whether it treats every row alike, so that rows may be dealt out freely."""
    if type(processor) is RepetitionPenaltyLogitsProcessor:
        return not isinstance(processor.prompt_ignore_length, Tensor)
    return type(processor) in _PREFIX_FREE | _ROW_FREE


def _refuse_stateful(processor: LogitsProcessor) -> None:
    for base in type(processor).__mro__:
        if base.__name__ in _REFUSED_PROCESSORS:
            raise ValueError(
                f"{type(processor).__name__} cannot be used here: "
                f"{_REFUSED_PROCESSORS[base.__name__]}"
            )


# in the order of generate(): setting -> (warper, its attribute, the value that is off)
_WARPERS: dict[str, tuple[type[Any], str, float]] = {
    "temperature": (TemperatureLogitsWarper, "temperature", 1.0),
    "top_k": (TopKLogitsWarper, "top_k", 0),
    "top_p": (TopPLogitsWarper, "top_p", 1.0),
    "min_p": (MinPLogitsWarper, "min_p", 0.0),
    "typical_p": (TypicalLogitsWarper, "mass", 1.0),
    "epsilon_cutoff": (EpsilonLogitsWarper, "epsilon", 0.0),
    "eta_cutoff": (EtaLogitsWarper, "epsilon", 0.0),
}

_PREFIX_FREE: frozenset[type[Any]] = frozenset(
    [
        *(warper for warper, _, _ in _WARPERS.values()),
        TopHLogitsWarper,
        InfNanRemoveLogitsProcessor,
        LogitNormalization,
        SuppressTokensLogitsProcessor,
    ]
)
_NAMES_PREFIX_FREE = frozenset(kind.__name__ for kind in _PREFIX_FREE)

_ROW_FREE: frozenset[type[Any]] = frozenset(
    [
        ExponentialDecayLengthPenalty,
        ForcedBOSTokenLogitsProcessor,
        ForcedEOSTokenLogitsProcessor,
        MinLengthLogitsProcessor,
        MinNewTokensLengthLogitsProcessor,
        NoBadWordsLogitsProcessor,
        NoRepeatNGramLogitsProcessor,
        PrefixConstrainedLogitsProcessor,  # it runs by place
        SequenceBiasLogitsProcessor,
        SuppressTokensAtBeginLogitsProcessor,
        WatermarkLogitsProcessor,
    ]
)

DOUBLED = (
    "drop it, or score both prompts as one doubled batch and combine them with "
    "mmspec.distributions.sampling.guide before the distribution"
)
_REFUSED_PROCESSORS = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "it keeps a key-value cache of its own that "
    f"cannot be rolled back; {DOUBLED}",
    "ClassifierFreeGuidanceLogitsProcessor": f"it halves the batch; {DOUBLED}",
    "DiaClassifierFreeGuidanceLogitsProcessor": f"it halves the batch; {DOUBLED}",
    "SynthIDTextWatermarkLogitsProcessor": "it remembers the contexts that it has seen and cannot "
    "forget a rejected draft; use WatermarkingConfig (a hash of the prefix), or remove it",
    "DiaEOSDelayPatternLogitsProcessor": "it counts steps since the end of each row and cannot "
    "forget a rejected draft; remove it from the logits processors",
}
