"""Text generation shared by modalities: `generate`, the hook of transformers, and their output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import (
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
)

from mmspec import _hf, _hf_cache
from mmspec.distributions.sampling import Sampling
from mmspec.errors import check_number
from mmspec.modalities.common.call_arguments import (
    bind_arguments,
    bind_hook,
    make_hook_signature,
)
from mmspec.modalities.common.output_options import OutputOptions
from mmspec.modalities.common.tokens import (
    MODEL_INPUTS,
    BoundTokens,
    first_id,
    pad_rows,
    prompt_ids,
    prompt_tensor,
)
from mmspec.modality import Call, Loop
from mmspec.stats import Stats
from mmspec.targets.cache import SlotCache
from mmspec.targets.readers.backbone import Backbone
from mmspec.targets.readers.encoder_decoder import source_carrier, source_inputs
from mmspec.targets.readers.visual import PIXELS, check_carrier, check_request, visual_ids
from mmspec.targets.stop import Stop
from mmspec.targets.tokens.context import check_inputs
from mmspec.targets.tokens.generation_settings import check_callables, infer_do_sample, refuse_modes
from mmspec.targets.tokens.generation_settings import resolve as resolve_settings
from mmspec.targets.tokens.turns import (
    EarlierTurns,
    check_cache,
    drop_cached_ids,
    full_attention_mask,
)

if TYPE_CHECKING:
    from mmspec.modalities.common.beam_generation import BeamOptions

BEAMS = "mmspec.modalities.common.beam_generation"  # imported by requests that ask for them
BEAM_SETTINGS = ("num_beams", "num_return_sequences")
# arguments of `generate` that are neither inputs of the model nor generation settings
OWN_ARGUMENTS = (
    *("seed", "row_ids", "streamer", "drafter_inputs", "tokenizer", "past_key_values"),
    *("generation_config", "stopping_criteria", "logits_processor", "prefix_allowed_tokens_fn"),
    "grammar",
)


@dataclass(frozen=True)
class Output:
    """Output of `generate`: fields as in transformers, and `stats`.

    With beams there are `num_return_sequences` rows per prompt, the best first.
    `scores` and `logits` are set with `output_scores` and `output_logits`, the cache if
    `past_key_values` was given or `return_dict_in_generate` is on.
    """

    sequences: Tensor  # (B, L + T): finished rows padded; L = 0 for embeddings
    stats: Stats
    scores: tuple[Tensor, ...] | None = None  # (B, V) per new token: processors and warpers applied
    logits: tuple[Tensor, ...] | None = None  # (B, V) per new token, unprocessed
    past_key_values: Any = None  # all but the last token, for the next turn
    sequences_scores: Tensor | None = None  # (B * R,) of beams, as in transformers

    @property
    def cache(self) -> Any:
        """`past_key_values`, which transformers calls `cache` since 5.24."""
        return self.past_key_values


class TextGenerator:
    """`generate` of a bound model, with the arguments of `model.generate`."""

    def __init__(
        self,
        bound: BoundTokens,
        prepare_inputs: Callable[[Mapping[str, Any]], dict[str, Any]] = dict,
        make_shared: Callable[[int], Mapping[str, Any]] | None = None,
    ) -> None:
        self.bound = bound
        self.prepare_inputs = prepare_inputs  # converts inputs to those of the reader
        self.make_shared = make_shared or share_nothing  # batch size -> `Request.shared`
        settings = vars(_hf.get_default_config()).keys() | LOOP_ARGUMENTS
        self.inputs = (MODEL_INPUTS | _hf.forward_names(bound.model)) - settings
        self.media = frozenset[str]()  # of encoder-decoders transformers passes the encoder output
        if not bound.model.config.is_encoder_decoder:  # pixels always, so that they can be refused
            self.media = _hf.encoder_input_names(bound.model) & self.inputs | set(PIXELS)
        self.signature = make_hook_signature(sorted(self.media))

    def generate(self, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop) -> Output:
        """Generate as `model.generate` does, with `seed` and `row_ids`.

        Sampling is on with `do_sample=True` or with a sampling setting (temperature, top_k, top_p,
        ...). With `seed`, every exact coupled recipe returns the tokens of plain decoding.
        """
        planned = self.plan(args, arguments)
        sequences, ending = planned.options.run(
            planned.call, planned.ids, planned.config, loop, planned.streamer
        )
        further = (ending.scores, ending.logits, ending.cache, ending.sequences_scores)
        return Output(sequences, loop.stats(), *further)

    def plan(self, args: Sequence[Any], arguments: Mapping[str, Any]) -> PlannedRequest:
        """The checked request of `generate`; nothing is decoded."""
        arguments = bind_arguments(args, arguments)
        inputs = {name: value for name, value in arguments.items() if name in self.inputs}
        own = {name: arguments.get(name) for name in OWN_ARGUMENTS}
        rest = {
            k: v for k, v in arguments.items() if k not in self.inputs and k not in OWN_ARGUMENTS
        }
        check_callables(own)
        has_past = own["past_key_values"] is not None  # then a mask may be longer than the ids
        self.check({n: v for n, v in inputs.items() if not has_past or n != "attention_mask"})
        inputs = self._complete_inputs(inputs, own["generation_config"], rest)
        model = self.bound.model
        check_carrier(inputs)
        inputs, past = self._split_turns(inputs, own["past_key_values"], own["drafter_inputs"])
        check_request(model, self.bound.backbone.family, drop_cached_ids(inputs, past))
        batch, device = len(prompt_tensor(inputs)), self.bound.backbone.device
        ids = prompt_ids(inputs, batch, device)
        sampling, config = resolve_settings(
            model,
            infer_do_sample(rest),
            ids.shape[1],
            prompt_tensor(inputs).device,
            batch=batch,
            config=own["generation_config"],
            inputs=source_carrier(inputs)
            if model.config.is_encoder_decoder
            else inputs.get("input_ids"),
            embeds=inputs.get("inputs_embeds"),
            attention_mask=full_attention_mask(inputs, past),  # as generate() shows processors
            processors=own["logits_processor"] or (),
            prefix_allowed_tokens_fn=own["prefix_allowed_tokens_fn"],
            honoured=BEAM_SETTINGS,
        )
        criteria = own["stopping_criteria"] or ()
        stop = Stop.resolve(model, config, ids.shape[1], criteria, own["tokenizer"])
        sampling, stop = self.bound.constrain(sampling, stop, batch, own)
        settings = (own["seed"], own["row_ids"], own["drafter_inputs"])
        shared = self.make_shared(batch)
        call = self.bound.call(inputs, sampling, stop, *settings, shared, past)
        call, options = self._choose_loop(call, ids, config, own)
        return PlannedRequest(call, ids, config, options, own["streamer"])

    def _choose_loop(
        self,
        call: Call,
        ids: Tensor,
        config: GenerationConfig,
        own: Mapping[str, Any],
        criteria: Any = None,
    ) -> tuple[Call, OutputOptions | BeamOptions]:
        """The loop of single paths, or a beam search."""
        if (config.num_beams or 1) > 1:
            made: tuple[Call, BeamOptions] = import_module(BEAMS).plan_beams(
                self.bound, call, ids, config, own, criteria
            )
            return made
        refuse_modes(self.bound.model, config)
        return call, OutputOptions.from_config(config, own.get("past_key_values"), self.bound)

    def hook(
        self,
        args: Sequence[Any],
        arguments: Mapping[str, Any],
        loop: Loop,
        streamer: Any = None,
    ) -> Any:
        """Run as the `custom_generate` hook: `model.generate(**inputs, custom_generate=fast)`.

        transformers passes the merged configuration and the inputs of its own loop, without the
        streamer. Returns what `generate()` returns.
        """
        planned = self.plan_hook(args, arguments)
        config, ids = planned.config, planned.ids
        sequences, ending = planned.options.run(planned.call, ids, config, loop, streamer)
        if not config.return_dict_in_generate:
            return sequences
        further: dict[str, Any] = {"scores": ending.scores, "logits": ending.logits}
        kinds: Any = (GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput)
        if (config.num_beams or 1) > 1:
            kinds = (GenerateBeamDecoderOnlyOutput, GenerateBeamEncoderDecoderOutput)
            further["sequences_scores"] = ending.sequences_scores
        kind = kinds[bool(self.bound.model.config.is_encoder_decoder)]
        return kind(sequences=sequences, **further, **{_hf_cache.CACHE_NAME: ending.cache})

    def plan_hook(self, args: Sequence[Any], arguments: Mapping[str, Any]) -> PlannedRequest:
        """The checked request of the `custom_generate` hook; nothing is decoded."""
        given = bind_hook(args, arguments)
        config, count = given["generation_config"], given["generation_config"].num_beams or 1
        if count > 1:
            given = import_module(BEAMS).drop_copies(given, count, self.media)
        model, ids = given["model"], given["input_ids"]
        if model is not _hf.unwrap_compiled(self.bound.model):
            raise ValueError(
                "this was accelerated for another model; call accelerate() on this one"
            )
        refuse_modes(model, config, BEAM_SETTINGS)
        check_callables(given)
        inputs, cache = self._collect_hook_inputs(given)
        inputs = self.prepare_inputs(inputs)
        if model.config.is_encoder_decoder:  # transformers has made the first decoder tokens
            inputs = source_inputs(model, {**inputs, "decoder_input_ids": inputs.pop("input_ids")})
        inputs, past = self._split_turns(inputs, cache, given.get("drafter_inputs"))
        check_request(model, self.bound.backbone.family, drop_cached_ids(inputs, past))
        stop = Stop.from_config(config, given.get("stopping_criteria") or (), ids.shape[1])
        processors = given.get("logits_processor") or ()
        sampling = Sampling.from_processors(processors, bool(config.do_sample))
        batch = len(prompt_tensor(inputs))
        sampling, stop = self.bound.constrain(sampling, stop, batch, given)
        settings = (given.get("seed"), given.get("row_ids"), given.get("drafter_inputs"))
        shared = self.make_shared(batch)
        call = self.bound.call(inputs, sampling, stop, *settings, shared, past)
        own = {**given, "past_key_values": cache}
        call, options = self._choose_loop(call, ids, config, own, given.get("stopping_criteria"))
        return PlannedRequest(call, ids, config, options)

    def _complete_inputs(
        self,
        inputs: Mapping[str, Any],
        config: GenerationConfig | None,
        settings: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Convert inputs to those of the reader; `settings` set the first token of a decoder."""
        made, model = self.prepare_inputs(inputs), self.bound.model
        has_prompt = made.get("input_ids") is not None or made.get("inputs_embeds") is not None
        if model.config.is_encoder_decoder or not has_prompt:
            start = {name: value for name, value in settings.items() if name in START_SETTINGS}
            merged = _hf.merge_config(model, config, start)
            if model.config.is_encoder_decoder:
                made = source_inputs(model, made, merged)
            else:
                made["input_ids"] = _make_start(model, merged, made)
        completed = self.bound.backbone.family.add_placeholders
        return made if completed is None else completed(model, made)

    def _collect_hook_inputs(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """Return inputs and the user's cache from the arguments of transformers' own loop.

        Inputs that transformers computed without the media, which the hook takes by name, are
        dropped and computed again. Raises ValueError for inputs that the model cannot read.
        """
        model, ids, rest = given["model"], given["input_ids"], {**given.get("model_kwargs", {})}
        media = {name: rest.pop(name) for name in self.media if rest.get(name) is not None}
        if media:
            rest.pop("mm_encoder_outputs", None)
        others = {name: value for name, value in rest.items() if name not in LOOP_ARGUMENTS}
        is_embedded = not ids.shape[1] and "inputs_embeds" in others
        inputs = {"input_ids": None if is_embedded else ids, **media, **others}
        mask = None
        if not model.config.is_encoder_decoder:
            check_carrier(inputs)
            mask, width = inputs.get("attention_mask"), _hf.mask_length(given["generation_config"])
            if mask is None and width is not None:  # transformers dropped a mask of ones
                mask = inputs["attention_mask"] = ids.new_ones(len(ids), width)
        cache = _hf_cache.pop_cache(rest)
        cache = cache if cache is not None and _hf_cache.is_user_cache(cache) else None
        if cache is None and not is_embedded:
            self.check({"input_ids": ids, **media, "attention_mask": mask})
        if _hf.position_ids_are_generated(model, {**inputs, _hf_cache.CACHE_NAME: cache}, media):
            inputs.pop("position_ids")
        return inputs, cache

    def check(self, inputs: Mapping[str, Any]) -> None:
        """Refuse tensors that the model cannot read. Raises ValueError."""
        model, family = self.bound.model, self.bound.backbone.family
        known, device = model.get_input_embeddings().weight.shape[0], self.bound.backbone.device
        check_inputs(inputs, known, visual_ids(model, family), device)

    def _split_turns(
        self, inputs: dict[str, Any], cache: Any, drafter_inputs: Mapping[str, Any] | None
    ) -> tuple[dict[str, Any], EarlierTurns | None]:
        """Split a request into the new turn and the cached turns.

        Raises ValueError if the cache or the drafter does not support this.
        """
        drafter, name = self.bound.drafter, type(self.bound.drafter).__name__
        has_ids = inputs.get("input_ids") is not None or (
            isinstance(drafter_inputs, Mapping) and "input_ids" in drafter_inputs
        )
        if drafter.reads_prompt and not has_ids:
            raise ValueError(
                f"a prompt of inputs_embeds has no tokens that the draft model of {name} could "
                "read; give drafter_inputs={'input_ids': ...}, or a recipe without a draft model"
            )
        if cache is None:
            return inputs, None
        backbone = self.bound.backbone
        if not isinstance(backbone, Backbone):
            raise ValueError(
                f"past_key_values of a {type(backbone.model).__name__} cannot be used: only "
                "decoders without guidance continue from a cache; drop it"
            )
        check_cache(cache, SlotCache(backbone.cache_config), len(prompt_tensor(inputs)))
        if not _hf_cache.cached_length(cache):
            return inputs, None
        past = EarlierTurns.from_request(cache, inputs)
        past.check_features(name, drafter.required_features, bool(backbone.placeholder_ids))
        mask = inputs.get("attention_mask")
        if mask is not None and not past.includes_cached:
            inputs = {**inputs, "attention_mask": mask[:, past.length :]}
        return inputs, past


def share_nothing(batch: int) -> Mapping[str, Any]:
    """Return no shared values: the default of `TextGenerator.make_shared`."""
    return {}


@dataclass(frozen=True)
class PlannedRequest:
    """A checked request of `generate`."""

    call: Call
    ids: Tensor  # (B, L) the prompt; L = 0 for embeddings
    config: GenerationConfig
    options: OutputOptions | BeamOptions
    streamer: Any = None

    @property
    def extra_outputs(self) -> list[str]:
        """Outputs that need a run of this request alone."""
        return [*self.options.extra, *(() if self.streamer is None else ("streamer",))]

    def make_output(self, tokens: Sequence[Sequence[int]], stats: Stats) -> Output:
        """The output of `generate` for the new tokens of each row."""
        rows = pad_rows(tokens, first_id(self.config.pad_token_id, self.config.eos_token_id))
        return Output(torch.cat((self.ids, self.ids.new_tensor(rows)), 1), stats)


# arguments that transformers passes to a custom_generate callable and that are not needed here
LOOP_ARGUMENTS = frozenset(
    {
        *(*_hf_cache.CACHE_NAMES, "use_cache", "logits_to_keep", "return_dict"),
        *("output_hidden_states", "output_attentions"),
    }
)
START_SETTINGS = ("decoder_start_token_id", "bos_token_id")  # of the first decoder token


def _make_start(model: Any, config: Any, inputs: Mapping[str, Any]) -> Tensor:  # (B, 1)
    """The prompt of a request without one. Raises ValueError for a mask of another length."""
    if config.bos_token_id is not None:
        check_number("bos_token_id", config.bos_token_id, 0, whole=True)
    start, mask = _hf.make_bos_prompt(model, config, inputs), inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape != start.shape:
        raise ValueError(
            f"attention_mask {tuple(mask.shape)} is given without input_ids, and a request without "
            f"a prompt starts from one BOS token per row; give input_ids, or drop the mask"
        )
    return start
