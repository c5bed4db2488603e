"""Logits to distributions, in the same way for target (p) and drafter (q).

The steps of transformers' `generate()` for one position run on every node of a draft at once:
processors that read the prefix get each node's own path. No other module makes distributions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
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
from mmspec.distributions.call_state import (
    Group,
    StatefulProcessor,
    StateTrees,
    StateWatch,
    group_nodes,
    is_of_user,
    run_grouped,
)
from mmspec.distributions.categorical import Categorical
from mmspec.errors import check_flag, check_number, is_integer
from mmspec.trees import NodePrefix

Prefix = Callable[[int, int], Tensor]  # (row, node) -> (L,) int64: the tokens before that node


class PositionProcessor(Protocol):
    """Changes scores by the position of their token, for all nodes of a draft at once."""

    def __call__(self, scores: Tensor, position: Tensor) -> Tensor: ...  # (B, M, V), (B, M)


@dataclass(frozen=True)
class Sampling:
    """The sampling settings: how logits become distributions.

    The order is that of `generate()`: `processors`, then temperature, top-k, top-p, min-p, typical,
    epsilon, eta. Greedy decoding (`do_sample=False`) runs the processors only. The neutral value of
    every other setting switches it off. `processors` are stateless Hugging Face processors, or
    declare their state (`StatefulProcessor`); a custom one that keeps state between calls is
    refused when it runs (`call_state`).
    `position_processors` run first and depend on absolute positions only.
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
    position_processors: tuple[PositionProcessor, ...] = ()

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
                f"temperature={self.temperature} must be at least 1e-08 to sample; give 0 for "
                "greedy decoding, or a number above it, 1.0 = off"
            )
        if not is_integer(self.top_k) or self.top_k < 0:
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
            _check_stateless(processor)

    @classmethod
    def from_processors(cls, processors: Iterable[LogitsProcessor], do_sample: bool) -> Sampling:
        """Read a list of processors as `generate()` builds it.

        Trailing warpers in the order above become settings; all processors before them stay
        `processors`, in order.
        """
        remaining = list(processors)
        settings: dict[str, Any] = {}
        if do_sample:
            if remaining and type(remaining[-1]) is LogitNormalization:
                remaining.pop()  # distributions are normalised on use
            rank = len(_WARPERS)
            while remaining and (found := _to_setting(remaining[-1], rank)) is not None:
                rank, name, value = found
                settings[name] = value
                remaining.pop()
        return cls(do_sample=do_sample, processors=tuple(remaining), **settings)

    def add_processor(self, processor: LogitsProcessor) -> Sampling:
        """The settings with one more processor, which runs before those that cut a distribution."""
        kept, cut = list(self.processors), list[LogitsProcessor]()
        while kept and type(kept[-1]) in _CUTS:
            cut.insert(0, kept.pop())
        return replace(self, processors=(*kept, processor, *cut))

    @property
    def needs_prefix(self) -> bool:
        """Whether a distribution depends on its prefix."""
        return any(type(processor) not in _PREFIX_FREE for processor in self.processors)

    @cached_property
    def is_constrained(self) -> bool:
        """Whether a processor declares its state, and so may let no token of a draft follow."""
        return any(isinstance(processor, StatefulProcessor) for processor in self.processors)

    @cached_property
    def state_trees(self) -> StateTrees:
        """The states of processors that declare them, of this request."""
        return StateTrees()

    @cached_property
    def of_drafts(self) -> Sampling:
        """The settings of draft distributions: without processors that leave drafts as they are."""
        kept = [
            processor
            for processor in self.processors
            if not isinstance(processor, StatefulProcessor) or processor.masks_drafts
        ]
        return self if len(kept) == len(self.processors) else replace(self, processors=tuple(kept))

    @property
    def has_processors(self) -> bool:
        """Whether anything but the settings changes scores."""
        return bool(self.processors or self.position_processors)

    def distribution(
        self, logits: Tensor, prefix: Prefix | None = None, position: Tensor | None = None
    ) -> Categorical:
        """Distributions (B, M) from logits (B, M, V), in float32, or float64 for float64 logits.

        `prefix(row, node)` are the tokens before a node as `generate()` gives them to processors,
        including left padding of the prompt. For a padded node any true prefix of the row will do.
        `position` (B, M) are the positions of the predicted tokens, for `position_processors`.
        """
        scores = _widen(logits)
        for change in self.position_processors:
            if position is None:
                raise ValueError(
                    f"{type(change).__name__} depends on positions; give distribution() position="
                )
            scores = change(scores, position)
        if self.processors:
            scores = self._process(scores, prefix)
        if self.do_sample and self._warpers:
            if any(type(warper) not in _LAST_AXIS_ONLY for warper in self._warpers):
                scores = scores.flatten(0, 1)
            for warper in self._warpers:
                scores = warper(_no_ids(len(scores), scores.device), scores)
            scores = scores if scores.shape == logits.shape else scores.view(logits.shape)
        return Categorical(scores, hard=not self.do_sample)

    @cached_property
    def _warpers(self) -> tuple[LogitsProcessor, ...]:
        """Hugging Face's warpers, which work row by row, so results equal those of `generate()`."""
        return tuple(
            TopK(int(value)) if name == "top_k" else warper(float(value))
            for name, (warper, _, off) in _WARPERS.items()
            if (value := getattr(self, name)) != off
        )

    def _process(self, scores: Tensor, prefix: Prefix | None) -> Tensor:  # (B, M, V) -> (B, M, V)
        batch, nodes, _ = scores.shape
        paths: list[Tensor] = []
        groups: list[Group] = []
        if self.needs_prefix and prefix is None:
            names = sorted({type(p).__name__ for p in self.processors} - _NAMES_PREFIX_FREE)
            raise ValueError(
                f"{', '.join(names)} read the tokens before; give distribution() a prefix"
            )
        if prefix is not None and self._reads_paths:
            paths = [
                prefix(row, node).to(scores.device) for row in range(batch) for node in range(nodes)
            ]
            row_bound = not all(_ignores_rows(p) for p in self.processors)
            groups = group_nodes(paths, batch, row_bound)
        flat = scores.flatten(0, 1)
        for processor, watch in zip(self.processors, self._watches, strict=True):
            if isinstance(processor, StatefulProcessor):
                assert isinstance(prefix, NodePrefix)  # of a request; others come from tests
                flat = self.state_trees.process(processor, flat, prefix, nodes)
                continue
            run = partial(_run, processor, flat, paths, nodes, groups)
            flat = run() if watch is None else watch.run(run)
        return flat.view(scores.shape)

    @cached_property
    def _watches(self) -> tuple[StateWatch | None, ...]:
        """Watches of the user's own processors."""
        return tuple(StateWatch(p) if is_of_user(p) else None for p in self.processors)

    @cached_property
    def _reads_paths(self) -> bool:
        """Whether a processor is called with the ids of the tokens before."""
        return any(
            type(p) not in _PREFIX_FREE and not isinstance(p, StatefulProcessor)
            for p in self.processors
        )


def guide(cond: Tensor, uncond: Tensor | None, scale: float) -> Tensor:  # (..., V) x2 -> (..., V)
    """Classifier-free guidance of two branches scored in one doubled batch (Ho and Salimans 2022).

    u + s (c - u) on raw logits, before every processor. Applying it to log-probabilities (Sanchez
    et al. 2023) shifts all scores of a position by a constant, so the distribution is the same.
    `scale` 1 is no guidance: the second branch is not used and may be None.
    """
    if scale == 1:
        return cond
    if uncond is None:
        raise ValueError(
            f"guidance scale {scale} needs the unconditional logits; pass them, or scale=1"
        )
    c, u = _widen(cond), _widen(uncond)
    return u + (c - u) * scale


class TopK(TopKLogitsWarper):
    """Hugging Face's top-k on any leading axes, in fewer operations."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        least = scores.topk(min(self.top_k, scores.shape[-1])).values[..., -1:]
        return scores.masked_fill(scores < least, self.filter_value)


def _run(
    processor: LogitsProcessor,
    flat: Tensor,
    paths: list[Tensor],
    nodes: int,
    groups: list[Group],
) -> Tensor:  # (B * M, V)
    if type(processor) in _PREFIX_FREE:
        changed: Tensor = processor(_no_ids(len(flat), flat.device), flat)
        return changed
    if type(processor) is PrefixConstrainedLogitsProcessor:
        return _run_per_node(processor, flat, paths, nodes)
    return run_grouped(processor, flat, groups)


def _run_per_node(
    processor: PrefixConstrainedLogitsProcessor, flat: Tensor, paths: list[Tensor], nodes: int
) -> Tensor:
    """Call a user's prefix constraint on true prefixes only, never on fillers."""
    results = [
        _hf.bind_row(processor, index // nodes)(path[None], flat[index : index + 1])
        for index, path in enumerate(paths)
    ]
    return torch.cat(results)


@lru_cache(maxsize=64)
def _no_ids(count: int, device: torch.device) -> Tensor:  # (R, 0)
    return torch.empty(count, 0, dtype=torch.int64, device=device)


def _widen(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _to_setting(processor: LogitsProcessor, rank: int) -> tuple[int, str, Any] | None:
    """The setting that equals a warper of rank below `rank`; None where there is none."""
    state = vars(processor)
    if state.get("filter_value", -float("inf")) != -float("inf"):
        return None
    if state.get("min_tokens_to_keep", 1) != 1:
        return None
    for index, (name, (warper, attribute, _)) in enumerate(_WARPERS.items()):
        if type(processor) is warper and index < rank:
            value = state[attribute]
            if name == "top_p" and value == 0:
                return None  # Hugging Face treats it as "the best token only"
            return index, name, value if name == "top_k" else float(value)
    return None


def _ignores_rows(processor: LogitsProcessor) -> bool:
    """Whether it treats every row alike, so that rows may be grouped freely."""
    if type(processor) is RepetitionPenaltyLogitsProcessor:
        return not isinstance(processor.prompt_ignore_length, Tensor)
    return type(processor) in _PREFIX_FREE | _ROW_FREE or isinstance(processor, StatefulProcessor)


def _check_stateless(processor: LogitsProcessor) -> None:
    for base in type(processor).__mro__:
        if base.__name__ in _REFUSED_PROCESSORS:
            raise ValueError(
                f"{type(processor).__name__} cannot be used here: "
                f"{_REFUSED_PROCESSORS[base.__name__]}"
            )


# in the order of generate(): setting -> (warper, its attribute, neutral value)
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
_CUTS = (*(warper for warper, _, _ in _WARPERS.values()), TopHLogitsWarper)
_LAST_AXIS_ONLY = (TemperatureLogitsWarper, TopK)  # work on any leading axes
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
        PrefixConstrainedLogitsProcessor,  # runs per node
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
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "it keeps its own key-value cache, which "
    f"cannot be rolled back; {DOUBLED}",
    "ClassifierFreeGuidanceLogitsProcessor": f"it halves the batch; {DOUBLED}",
    "DiaClassifierFreeGuidanceLogitsProcessor": f"it halves the batch; {DOUBLED}",
    "SynthIDTextWatermarkLogitsProcessor": "it keeps the contexts of earlier calls and cannot "
    "drop a rejected draft; use WatermarkingConfig (a hash of the prefix), or remove it",
    "DiaEOSDelayPatternLogitsProcessor": "it counts steps since the end of each row and cannot "
    "drop a rejected draft; remove it from the logits processors",
}
