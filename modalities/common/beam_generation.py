"""Beam search of text generation: what `num_beams` of `generate` needs, and what it refuses."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from transformers.utils.generic import ModelOutput

from mmspec import _hf
from mmspec._hf_beams import BeamSearch, best_sequences
from mmspec.beams import BeamParts, decode_beams
from mmspec.distributions.call_state import is_of_user
from mmspec.distributions.noise import Keys
from mmspec.distributions.sampling import Sampling
from mmspec.drafters.beams import make_beam_drafter
from mmspec.modalities.common.tokens import BoundTokens
from mmspec.modality import Call, Loop
from mmspec.targets.readers.backbone import Backbone
from mmspec.targets.readers.encoder_decoder import EncoderDecoder
from mmspec.targets.tokens.outcome import RequestOutcome
from mmspec.verifiers.beams import StrictBeams


@dataclass(frozen=True)
class BeamOptions:
    """A beam search in place of the decoding loop of single paths."""

    searches: Sequence[BeamSearch]
    extra: tuple[str, ...] = ("num_beams",)  # needs a run of this request alone

    def run(
        self, call: Call, ids: Tensor, config: GenerationConfig, loop: Loop, streamer: Any = None
    ) -> tuple[Tensor, RequestOutcome]:
        """Run a request; returns sequences (B * R, L + T) and their scores.

        Raises ValueError where rounds are observed.
        """
        if loop.is_watched or streamer is not None:
            raise ValueError(
                f"num_beams={config.num_beams}: no token of a beam search is final before its end, "
                "so there is nothing to stream, observe or trace; drop streamer=, on_round= and "
                "trace=, call generate() instead of stream(), or pass num_beams=1"
            )
        with explain_memory(config):
            for _ in loop(call):
                pass
            sequences, scores = best_sequences(self.searches)
        return sequences, RequestOutcome(sequences_scores=scores)


def plan_beams(
    bound: BoundTokens,
    call: Call,
    ids: Tensor,
    config: GenerationConfig,
    own: Mapping[str, Any],
    criteria: Any = None,
) -> tuple[Call, BeamOptions]:
    """The call of a checked request with `config.num_beams` beams.

    `ids` (B, L) is its prompt, `own` has the arguments that are no settings, and `criteria` are all
    stopping criteria where transformers has made them. Raises ValueError for what a beam search
    cannot honour.
    """
    request: Any = call.request
    sampling = request.sampling
    check_request(bound, sampling, config, own, len(ids))
    if criteria is None:
        users = own.get("stopping_criteria") or ()
        criteria = _hf.make_stopping_criteria(bound.model, config, users, own.get("tokenizer"))
    warpers = _make_warpers(bound.model, config, ids) if config.do_sample else []
    noise = request.noise.rows if config.do_sample else None
    with explain_memory(config):
        searches = [
            BeamSearch(
                config,
                row,
                [*_bind_row(sampling, index, len(ids)), *warpers],
                criteria,
                None if noise is None else Keys(noise[index].expand(config.num_beams)),
            )
            for index, row in enumerate(ids)
        ]
    eos = sorted(_hf.eos_ids(config))
    name = bound.recipe.name or "custom"
    processors = [[one for one in search.processors if not _is_of_user(one)] for search in searches]
    drafter = make_beam_drafter(
        bound.drafter,
        eos,
        bound.backbone.vocabulary,
        name,
        config.num_beams,
        processors if any(processors) else (),
    )
    target = replace(
        bound.target,
        uses_trees=True,
        defers_prefill=False,
        joins_prefill=False,
        deferred_features=frozenset(),
    )
    parts = BeamParts(target, drafter, StrictBeams(), searches)
    call = replace(
        call,
        request=replace(request, sampling=Sampling()),  # the searches run the processors
        rounds=lambda own_request: decode_beams(parts, own_request),
    )
    return call, BeamOptions(searches)


@contextmanager
def explain_memory(config: GenerationConfig) -> Iterator[None]:
    """Name the number of beams in an error of an allocator. Raises ValueError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        is_cpu = "can't allocate memory" in str(error)
        if not is_cpu and not isinstance(error, torch.OutOfMemoryError | MemoryError):
            raise
        raise ValueError(
            f"num_beams={config.num_beams}: memory is too small for so many beams of up to "
            f"{config.max_length} tokens; give fewer beams, or fewer tokens"
        ) from error


def check_request(
    bound: BoundTokens,
    sampling: Sampling,
    config: GenerationConfig,
    own: Mapping[str, Any],
    batch: int,
) -> None:
    """Raises ValueError that names everything in a request that a beam search cannot honour."""
    beams, name = config.num_beams, bound.recipe.name or "custom"
    if not bound.recipe.exact:
        raise ValueError(
            f"num_beams={beams}: recipe {name!r} is lossy for single paths and has no rule for "
            "beams, which are verified exactly; choose an exact recipe, such as coupled, or pass "
            "num_beams=1"
        )
    if not isinstance(bound.backbone, Backbone | EncoderDecoder):
        raise ValueError(
            f"num_beams={beams}: {type(bound.model).__name__} is read with guidance here, by two "
            "prompts at once, which have no beams; pass num_beams=1"
        )
    if not bound.backbone.can_branch:
        raise ValueError(
            f"num_beams={beams}: {type(bound.model).__name__} {bound.backbone.obstacle}, so its "
            "cache cannot hold several beams; pass num_beams=1, or use model.generate()"
        )
    given = {
        "output_scores=True": config.output_scores,
        "output_logits=True": config.output_logits,
        "past_key_values=": own.get("past_key_values") is not None,
        "grammar=": own.get("grammar") is not None or sampling.is_constrained,
        "compile=True": bound.compiled is not None,
        "encoder penalties": any(type(one).__name__ in _ENCODER for one in sampling.processors),
    }
    if refused := [name for name, is_given in given.items() if is_given]:
        raise ValueError(
            f"num_beams={beams} does not go with {', '.join(refused)}: beams are the best "
            "continuations of one prompt, and only the returned sequences are kept; drop what is "
            "named, or pass num_beams=1"
        )
    given_functions = (*sampling.processors, *(own.get("stopping_criteria") or ()))
    users = list(filter(_is_of_user, given_functions))
    if batch > 1 and users:
        raise ValueError(
            f"num_beams={beams}: {type(users[0]).__name__} would be called with the beams of one "
            f"prompt at a time, not of all {batch} rows; give one prompt per call"
        )


_ENCODER = ("EncoderRepetitionPenaltyLogitsProcessor", "EncoderNoRepeatNGramLogitsProcessor")


def _is_of_user(processor: Any) -> bool:
    is_bound = isinstance(processor, PrefixConstrainedLogitsProcessor)  # called with its row
    return is_of_user(processor) and not is_bound


def _make_warpers(model: Any, config: GenerationConfig, ids: Tensor) -> list[Any]:
    """Temperature, top-k and the like of sampled beams, which keep two tokens or more."""
    made = _hf.make_logits_processors(model, config, ids.shape[1], ids.device)
    return [one for one in made if type(one).__name__.endswith("LogitsWarper")]


def _bind_row(sampling: Sampling, row: int, batch: int) -> list[Any]:
    """The processors of one row."""
    return [_bind(one, row, batch) for one in sampling.processors]


def _bind(processor: Any, row: int, batch: int) -> Any:
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        return _hf.bind_row(processor, row)
    if isinstance(processor, RepetitionPenaltyLogitsProcessor):
        padding = processor.prompt_ignore_length
        if isinstance(padding, Tensor):  # of every row, or of every beam
            padding = int(padding[row * len(padding) // batch])
        return RepetitionPenaltyLogitsProcessor(processor.penalty, padding)
    return processor


def drop_copies(arguments: Mapping[str, Any], count: int, media: Collection[str]) -> dict[str, Any]:
    """Arguments of the hook, which `generate()` has expanded to `count` equal rows per prompt.

    Those of `media` are as they were given.
    """
    total = len(arguments["input_ids"])
    given = {
        name: value if name in media else _first_of(value, count, total)
        for name, value in arguments.get("model_kwargs", {}).items()
    }
    return {
        **arguments,
        "input_ids": arguments["input_ids"][::count],
        "model_kwargs": given,
    }


def _first_of(value: Any, count: int, total: int) -> Any:
    """The first of `count` equal rows each, where something has `total` rows."""
    if isinstance(value, Tensor):
        axis = 1 if value.dim() == 3 and len(value) != total else 0  # (axes, B, L) of M-RoPE
        is_expanded = value.dim() > axis and value.shape[axis] == total
        return value.index_select(axis, _rows(value, count, total)) if is_expanded else value
    if isinstance(value, ModelOutput):
        return type(value)(**{name: _first_of(one, count, total) for name, one in value.items()})
    return value


def _rows(value: Tensor, count: int, total: int) -> Tensor:
    return torch.arange(0, total, count, device=value.device)
