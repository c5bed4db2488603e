"""What modalities share that write text: `generate`, the hook of transformers, and their output."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from mmspec import _hf
from mmspec.distributions.sampling import Sampling
from mmspec.modalities.common.tokens import BoundTokens, carrier, first, padded, prompt_ids, spoken
from mmspec.modality import Call, Loop
from mmspec.stats import Stats
from mmspec.targets.cache import SlotCache
from mmspec.targets.readers.backbone import Backbone
from mmspec.targets.readers.encoder_decoder import source_carrier, source_inputs
from mmspec.targets.readers.visual import PIXELS, check_carrier, check_request, visual_ids
from mmspec.targets.stop import Stop
from mmspec.targets.tokens.generation_settings import check_parts, refuse_modes, sampled
from mmspec.targets.tokens.generation_settings import resolve as resolve_settings
from mmspec.targets.tokens.inputs import check_inputs
from mmspec.targets.tokens.outcome import Ending, OutcomeRecorder
from mmspec.targets.tokens.turns import (
    EarlierTurns,
    check_cache,
    check_room,
    prompt_slots,
    unread,
    whole_mask,
)

# what `generate` takes beside a model's inputs and generation settings
OWN = (
    *("seed", "row_ids", "streamer", "drafter_inputs", "tokenizer", "past_key_values"),
    *("generation_config", "stopping_criteria", "logits_processor", "prefix_allowed_tokens_fn"),
)
# inputs that some forwards take under `**kwargs`, or that a text model must be able to refuse
MODEL_INPUTS = frozenset(
    {
        *("pixel_values", "pixel_values_videos", "input_ids", "attention_mask", "inputs_embeds"),
        *("token_type_ids", "mm_token_type_ids"),
    }
)


@dataclass(frozen=True)
class Output:
    """What `generate` returns: what transformers gives, by its names, and the run's own report.

    `scores` and `logits` are there where `output_scores` and `output_logits` ask for them, the
    cache where `past_key_values` was given or `return_dict_in_generate` is on.
    """

    sequences: Tensor  # (B, L + T): prompt, new tokens, finished rows padded; T of embeddings alone
    stats: Stats
    scores: tuple[Tensor, ...] | None = None  # (B, V) per new token: processors and warpers applied
    logits: tuple[Tensor, ...] | None = None  # (B, V) per new token, as the model gives them
    past_key_values: Any = None  # all but the last token, for the next turn


class Text:
    """`generate` of a bound model: the model's own arguments, and its own output."""

    def __init__(
        self,
        bound: BoundTokens,
        prepared: Callable[[Mapping[str, Any]], dict[str, Any]] = dict,
        shared: Callable[[int], Mapping[str, Any]] | None = None,
    ) -> None:
        self.bound = bound
        self.prepared = prepared  # inputs as the reader takes them
        self.shared = shared or nothing_shared  # what a call of so many rows offers its parts
        settings = vars(_hf.default_config()).keys() | LOOP_ARGUMENTS
        self.inputs = (MODEL_INPUTS | _hf.forward_names(bound.model)) - settings
        self.media = frozenset[str]()  # behind an encoder: transformers hands on what that made
        if not bound.model.config.is_encoder_decoder:  # pixels even if it reads none: we say so
            self.media = _hf.encoded_names(bound.model) & self.inputs | set(PIXELS)
        self.signature = _signature(sorted(self.media))

    def generate(self, args: Sequence[Any], arguments: Mapping[str, Any], loop: Loop) -> Output:
        """As `model.generate`, plus `seed` and `row_ids`.

        Sampling is on when `do_sample=True` or when a sampling setting (temperature, top_k, top_p,
        ...) is given. With `seed`, every exact coupled recipe returns the tokens of plain decoding.
        """
        arguments = placed(args, arguments)
        inputs = {name: value for name, value in arguments.items() if name in self.inputs}
        own = {name: arguments.get(name) for name in OWN}
        rest = {k: v for k, v in arguments.items() if k not in self.inputs and k not in OWN}
        check_parts(own)
        behind = own["past_key_values"] is not None  # then a mask may be longer than the ids
        self.check({n: v for n, v in inputs.items() if not behind or n != "attention_mask"})
        inputs, model = self._completed(inputs, own["generation_config"], rest), self.bound.model
        check_carrier(inputs)
        inputs, past = self._begun(inputs, own["past_key_values"], own["drafter_inputs"])
        check_request(model, self.bound.backbone.family, unread(inputs, past))
        batch, device = len(carrier(inputs)), self.bound.backbone.device
        ids = prompt_ids(inputs, batch, device)
        sampling, config = resolve_settings(
            model,
            sampled(rest),
            ids.shape[1],
            carrier(inputs).device,
            batch=batch,
            config=own["generation_config"],
            inputs=source_carrier(inputs)
            if model.config.is_encoder_decoder
            else inputs.get("input_ids"),
            embeds=inputs.get("inputs_embeds"),
            attention_mask=whole_mask(inputs, past),  # as generate() shows it to processors
            processors=own["logits_processor"] or (),
            prefix_allowed_tokens_fn=own["prefix_allowed_tokens_fn"],
        )
        criteria = own["stopping_criteria"] or ()
        stop = Stop.resolve(model, config, ids.shape[1], criteria, own["tokenizer"])
        asked = _Asked.of(config, own["past_key_values"], self.bound)
        how = (own["seed"], own["row_ids"], own["drafter_inputs"])
        shared = self.shared(len(carrier(inputs)))
        call = self.bound.call(inputs, sampling, stop, *how, shared, past)
        sequences, ending = asked.answer(call, ids, config, loop, own["streamer"])
        found = (ending.scores, ending.logits, ending.cache)
        return Output(sequences, loop.stats(), *found)

    def hook(
        self,
        args: Sequence[Any],
        arguments: Mapping[str, Any],
        loop: Loop,
        streamer: Any = None,
    ) -> Any:
        """The `custom_generate` hook: `model.generate(**inputs, custom_generate=fast)`.

        transformers has merged the configuration and hands over what it made for its own loop; not
        the streamer. Returns what `generate()` returns.
        """
        given = HOOK.bind(*args, **arguments).arguments
        model, ids, config = given["model"], given["input_ids"], given["generation_config"]
        if model is not _hf.uncompiled(self.bound.model):
            raise ValueError(
                "this was accelerated for another model; call accelerate() on this one"
            )
        refuse_modes(model, config)
        inputs, cache = self._handed(given)
        inputs = self.prepared(inputs)
        if model.config.is_encoder_decoder:  # whose first tokens transformers has made
            inputs = source_inputs(model, {**inputs, "decoder_input_ids": inputs.pop("input_ids")})
        inputs, past = self._begun(inputs, cache, given.get("drafter_inputs"))
        check_request(model, self.bound.backbone.family, unread(inputs, past))
        stop = Stop.from_config(config, given.get("stopping_criteria") or (), ids.shape[1])
        processors = given.get("logits_processor") or ()
        sampling = Sampling.from_processors(processors, bool(config.do_sample))
        asked = _Asked.of(config, cache, self.bound)
        how = (given.get("seed"), given.get("row_ids"), given.get("drafter_inputs"))
        shared = self.shared(len(carrier(inputs)))
        call = self.bound.call(inputs, sampling, stop, *how, shared, past)
        sequences, ending = asked.answer(call, ids, config, loop, streamer)
        if not config.return_dict_in_generate:
            return sequences
        kinds: Any = (GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput)
        return kinds[bool(model.config.is_encoder_decoder)](
            sequences=sequences,
            scores=ending.scores,
            logits=ending.logits,
            past_key_values=ending.cache,
        )

    def _completed(
        self,
        inputs: Mapping[str, Any],
        config: GenerationConfig | None,
        settings: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Inputs as the reader takes them; a decoder behind an encoder begins by these settings."""
        made, model = self.prepared(inputs), self.bound.model
        if model.config.is_encoder_decoder:
            begins = {name: value for name, value in settings.items() if name in BEGINNINGS}
            made = source_inputs(model, made, _hf.merge_config(model, config, begins))
        completed = self.bound.backbone.family.completed
        return made if completed is None else completed(model, made)

    def _handed(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """Inputs, and the user's cache, out of what transformers made for its own loop.

        What it made without the pictures, which the hook names, is left to be made with them.
        Raises ValueError for what the model cannot read.
        """
        model, ids, rest = given["model"], given["input_ids"], {**given.get("model_kwargs", {})}
        media = {name: rest.pop(name) for name in self.media if rest.get(name) is not None}
        if media:
            rest.pop("mm_encoder_outputs", None)
        kept = {name: value for name, value in rest.items() if name not in LOOP_ARGUMENTS}
        is_embedded = not ids.shape[1] and "inputs_embeds" in kept
        inputs = {"input_ids": None if is_embedded else ids, **media, **kept}
        mask = None
        if not model.config.is_encoder_decoder:
            check_carrier(inputs)
            mask, width = inputs.get("attention_mask"), _hf.mask_length(given["generation_config"])
            if mask is None and width is not None:  # it hid nothing, and was taken away
                mask = inputs["attention_mask"] = ids.new_ones(len(ids), width)
        cache = rest.get("past_key_values")
        cache = cache if cache is not None and _hf.is_given(cache) else None
        if cache is None and not is_embedded:
            self.check({"input_ids": ids, **media, "attention_mask": mask})
        if _hf.position_ids_are_generated(model, {**inputs, "past_key_values": cache}, media):
            inputs.pop("position_ids")
        return inputs, cache

    def check(self, inputs: Mapping[str, Any]) -> None:
        """Refuse tensors that the model cannot read. Raises ValueError."""
        model, family = self.bound.model, self.bound.backbone.family
        words = model.get_input_embeddings().weight
        check_inputs(inputs, words.shape[0], visual_ids(model, family), words.device)

    def _begun(
        self, inputs: dict[str, Any], cache: Any, drafter_inputs: Mapping[str, Any] | None
    ) -> tuple[dict[str, Any], EarlierTurns | None]:
        """The request as one turn, and the turns before. Raises ValueError where it cannot be."""
        drafter, name = self.bound.drafter, type(self.bound.drafter).__name__
        told = inputs.get("input_ids") is not None or "input_ids" in (drafter_inputs or {})
        if drafter.reads and not told:
            raise ValueError(
                f"a prompt of inputs_embeds has no tokens that the draft model of {name} could "
                "read; give drafter_inputs={'input_ids': ...}, or a recipe without a draft model"
            )
        if cache is None:
            return inputs, None
        backbone = self.bound.backbone
        if not isinstance(backbone, Backbone):
            raise ValueError(
                f"past_key_values of a {type(backbone.model).__name__} cannot be taken up: only "
                "decoders without guidance go on from a cache; drop it"
            )
        check_cache(cache, SlotCache(backbone.cache_config), len(carrier(inputs)))
        if not _hf.held(cache):
            return inputs, None
        past = EarlierTurns.of(cache, inputs)
        missing = sorted(drafter.wants)
        if missing:
            raise ValueError(
                f"{name} drafts from what the target makes of the whole prompt "
                f"({', '.join(missing)}), and past_key_values holds a part of it already; drop "
                "past_key_values, or use a recipe with a draft model or a lookup"
            )
        mask = inputs.get("attention_mask")
        if mask is not None and not past.is_told:
            inputs = {**inputs, "attention_mask": mask[:, past.length :]}
        return inputs, past


def nothing_shared(batch: int) -> Mapping[str, Any]:
    """Of models whose parts go by the prompt alone."""
    return {}


@dataclass(frozen=True)
class _Asked:
    """What is wanted beside the tokens."""

    cache: Any  # the user's
    returns_cache: bool
    scores: bool
    logits: bool
    normalised: bool  # scores that our distributions normalise only when asked

    @classmethod
    def of(cls, config: GenerationConfig, cache: Any, bound: BoundTokens) -> _Asked:
        """Raises ValueError for scores that nobody computes."""
        scores, logits = bool(config.output_scores), bool(config.output_logits)
        if (scores or logits) and bound.gate is not None:
            raise ValueError(
                "output_scores and output_logits need a recipe that scores every token, and the "
                f"gate of {bound.recipe.name or 'this one'} keeps some unseen; choose another"
            )
        returned = cache is not None or bool(config.return_dict_in_generate)
        returned = returned and isinstance(bound.backbone, Backbone)
        normalised = bool(config.do_sample and config.renormalize_logits)
        return cls(cache, returned, scores, logits, normalised)

    def answer(
        self, call: Call, ids: Tensor, config: GenerationConfig, loop: Loop, streamer: Any = None
    ) -> tuple[Tensor, Ending]:
        """Sequences (B, L + T), and what else was asked for."""
        request: Any = call.request
        target: Any = call.parts.target
        if self.cache is not None:
            check_room(self.cache, prompt_slots(request.inputs, request.past) + request.room - 1)
        recorder = None
        if self.returns_cache or self.scores or self.logits:
            recorder = OutcomeRecorder(target, self.scores or self.logits)
            call = replace(call, parts=replace(call.parts, target=recorder))
        tokens, _ = spoken(call, ids, loop, streamer)
        rows = padded(tokens, first(config.pad_token_id, config.eos_token_id))
        sequences = torch.cat((ids, torch.tensor(rows, dtype=ids.dtype, device=ids.device)), 1)
        if recorder is None:
            return sequences, Ending()
        ending = recorder.finish(rows, self.cache, self.returns_cache)
        scores = ending.scores
        if scores is not None and self.normalised:
            scores = tuple(step.log_softmax(-1) for step in scores)
        return sequences, replace(
            ending,
            scores=scores if self.scores else None,
            logits=ending.logits if self.logits else None,
        )


# what transformers' own loop hands to a custom_generate callable, and this one makes itself
LOOP_ARGUMENTS = frozenset(
    {
        *("past_key_values", "use_cache", "logits_to_keep", "return_dict"),
        *("output_hidden_states", "output_attentions"),
    }
)
HOOK_OWN = ("seed", "row_ids", "drafter_inputs")  # arguments of ours


BEGINNINGS = ("decoder_start_token_id", "bos_token_id")  # settings that a decoder begins by


def _signature(media: Sequence[str] = ()) -> inspect.Signature:
    """What transformers looks at to know which arguments the hook wants untouched.

    The pictures are named because it leaves named arguments alone: otherwise it would hand on its
    own encoding of them, and a draft model with an encoder of its own would see nothing.
    """
    names = ("logits_processor", "stopping_criteria", "generation_config")
    either, named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, either) for name in ("model", "input_ids")]
    wanted = (*names, *HOOK_OWN, *media)
    parameters += [inspect.Parameter(name, named, default=None) for name in wanted]
    rest = inspect.Parameter("model_kwargs", inspect.Parameter.VAR_KEYWORD)
    return inspect.Signature([*parameters, rest])


HOOK = _signature()


def placed(
    args: Sequence[Any], arguments: Mapping[str, Any], name: str = "input_ids"
) -> dict[str, Any]:
    """Arguments by name; the model's main input may come by place, as in `model.generate(ids)`."""
    if not args:
        return dict(arguments)
    if len(args) > 1 or name in arguments:
        raise ValueError(
            f"generate() takes {name} by place, once, and everything else by name; give "
            "generate(**inputs)"
        )
    return {name: args[0], **arguments}
