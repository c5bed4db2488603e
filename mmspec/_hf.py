"""Wrappers of private transformers generation code, one function each.

`tests/test_hf.py` holds one contract test per function, which fails when a
release changes it. No other module calls a private method of transformers' `generate`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)

from mmspec._hf_cache import CACHE_NAME, CACHE_NAMES, cached_length


@lru_cache(maxsize=1)
def get_default_config() -> GenerationConfig:
    """The empty config of the library; its fields are the known generation settings."""
    return GenerationConfig()


def get_default_settings(model: Any) -> dict[str, Any]:
    """Defaults of `generate()` for settings that neither the user nor the model gives."""
    return dict(model.generation_config._get_default_generation_params())


def merge_config(
    model: Any, config: GenerationConfig | None, settings: Mapping[str, Any]
) -> GenerationConfig:
    """Settings over `config` over `model.generation_config` over library defaults, in a copy."""
    merged, _ = model._prepare_generation_config(config, **settings)
    assert isinstance(merged, GenerationConfig)
    return merged


def set_special_tokens(
    model: Any, config: GenerationConfig, device: torch.device, batch: int, has_mask: bool
) -> None:
    """Turn the special token ids of `config` into tensors, in place, for the processors."""
    model._prepare_special_tokens(config, has_mask, device=device, batch_size=batch)


def make_decoder_prompt(
    model: Any, config: GenerationConfig, given: Tensor | None, batch: int, device: torch.device
) -> Tensor:  # (B, L)
    """The decoder prompt of an encoder-decoder: the start token, then the `given` tokens."""
    set_special_tokens(model, config, device, batch, has_mask=True)
    own = {} if given is None else {"decoder_input_ids": given}
    start, name = config._decoder_start_token_tensor, model.main_input_name
    made, _ = model._prepare_decoder_input_ids_for_generation(batch, name, own, start, device)
    assert isinstance(made, Tensor)
    return made


def set_lengths(
    model: Any,
    config: GenerationConfig,
    prompt_length: int,
    *,
    default_max: bool,
    default_min: bool,
    embeds: Tensor | None = None,
) -> GenerationConfig:
    """Fold `max_new_tokens` and `min_new_tokens` into `max_length` and `min_length`.

    `default_max` and `default_min`: `max_length` / `min_length` were not set. `prompt_length`
    counts ids: 0 for a prompt of `embeds` (B, L, D) only, which the lengths include all the same.
    """
    prepared = model._prepare_generated_length(
        generation_config=config,
        has_default_max_length=default_max,
        has_default_min_length=default_min,
        model_input_name="input_ids" if embeds is None else "inputs_embeds",
        inputs_tensor=embeds,
        input_ids_length=prompt_length,
    )
    assert isinstance(prepared, GenerationConfig)
    return prepared


def make_logits_processors(
    model: Any,
    config: GenerationConfig,
    prompt_length: int,
    device: torch.device,
    *,
    inputs: Tensor | None = None,
    attention_mask: Tensor | None = None,
    extra: Sequence[LogitsProcessor] = (),
    prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
) -> LogitsProcessorList:
    """The processors of `generate()`, in its order; `extra` are the user's own.

    `inputs` (B, L) are the ids of the encoder penalties: the encoder's or the only prompt.
    """
    mask_name = "decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask"
    made = model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=prompt_length,
        encoder_input_ids=inputs,
        prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
        logits_processor=LogitsProcessorList(extra),
        device=device,
        model_kwargs={mask_name: attention_mask},
    )
    assert isinstance(made, LogitsProcessorList)
    return made


def bind_row(
    processor: PrefixConstrainedLogitsProcessor, row: int
) -> PrefixConstrainedLogitsProcessor:
    """The processor of one `row`, for a batch of that row alone."""
    allowed = processor._prefix_allowed_tokens_fn
    return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), 1)


def make_stopping_criteria(
    model: Any,
    config: GenerationConfig,
    extra: Sequence[StoppingCriteria] = (),
    tokenizer: Any = None,
) -> StoppingCriteriaList:
    """The criteria of `generate()`, in its order; `extra` are the user's own."""
    made = model._get_stopping_criteria(
        generation_config=config,
        stopping_criteria=StoppingCriteriaList(extra),
        tokenizer=tokenizer,
    )
    assert isinstance(made, StoppingCriteriaList)
    return made


def mask_length(config: GenerationConfig) -> int | None:
    """Columns of the attention mask that `generate()` removed because it masked nothing."""
    length: int | None = vars(config).get("_mask_length")
    return length


def eos_ids(config: GenerationConfig) -> frozenset[int]:
    """The end-of-sequence ids of a config, whether or not `set_special_tokens` ran on it."""
    ids = vars(config).get("_eos_token_tensor")
    if ids is None:
        ids = config.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset(torch.as_tensor(ids).reshape(-1).tolist())


def forward_names(model: Any) -> frozenset[str]:
    """Argument names of a model's forward, also under `torch.compile`."""
    forward = unwrap_compiled(model).forward
    own = getattr(forward, "__func__", None)  # of the class; read at every request
    return _names_of(forward) if own is None else _names_of(own) - {"self"}


@lru_cache(maxsize=256)
def _names_of(forward: Any) -> frozenset[str]:
    """Argument names; `args` and `kwargs` for those that take any, whatever they are called."""
    kinds, named = inspect.Parameter, inspect.signature(forward).parameters.items()
    usual: dict[Any, str] = {kinds.VAR_POSITIONAL: "args", kinds.VAR_KEYWORD: "kwargs"}
    return frozenset(usual.get(one.kind, name) for name, one in named)


def unwrap_compiled(model: Any) -> Any:
    """The model that `torch.compile(model)` keeps as `_orig_mod`."""
    return dict(model.named_children()).get("_orig_mod", model)


def replaces_loop(model: Any) -> bool:
    """Whether the decoding loop of a model's `generate()` is not that of transformers."""
    loop = getattr(unwrap_compiled(model), "_sample", None)
    return getattr(loop, "__func__", loop) not in (None, GenerationMixin._sample)


def cache_name(model: Any) -> str:
    """The name of a model's cache argument."""
    names = forward_names(model)
    return next((name for name in (CACHE_NAME, *CACHE_NAMES) if name in names), CACHE_NAME)


def prepare_prefill_inputs(
    model: Any, inputs: Mapping[str, Any], cache: Any, is_told: bool = False, scored: int = 1
) -> dict[str, Any]:
    """The arguments of the first forward, position ids and first-iteration preparation included.

    `inputs` are the processor's tensors; they may contain `position_ids`. With `is_told`
    they begin with the cached tokens, which are not read again. Logits are computed for the last
    `scored` positions.
    """
    given = {name: value for name, value in inputs.items() if value is not None}
    ids = given.pop("input_ids", None)
    mask = given.pop("attention_mask", None)
    start = cached_length(cache)
    source = ids if ids is not None else given["inputs_embeds"]
    names = forward_names(model)
    is_taken = "position_ids" in names or "input_ids" not in names  # a wrapper has no names
    if "position_ids" not in given and is_taken:
        # M-RoPE needs a mask: it reads the number of rows from it
        shape = (source.shape[0], source.shape[1] + (0 if is_told else start))
        seen = torch.ones(shape, dtype=torch.int64, device=source.device)
        # after a cache M-RoPE uses what the model stored last, unless the grids are complete
        grids = is_told and any(given.get(f"{kind}_grid_thw") is not None for kind in _GRIDS)
        known = None if grids or not start else cache
        hints = {
            **given,
            "attention_mask": seen if mask is None else mask,
            CACHE_NAME: known,
        }
        given["position_ids"] = model._prepare_position_ids_for_generation(source, hints)
    if mask is not None and bool(mask.all()):
        mask = None  # the kernel then uses its own causal mask
    if ids is None:
        ids = torch.zeros(given["inputs_embeds"].shape[:2], dtype=torch.int64, device=model.device)
    prepared = model.prepare_inputs_for_generation(
        ids,
        **{cache_name(model): cache},
        attention_mask=mask,
        is_first_iteration=True,
        use_cache=True,
        logits_to_keep=scored,
        next_sequence_length=source.shape[1] - start if is_told else None,
        **given,
    )
    assert isinstance(prepared, dict)
    return prepared


def make_prompt_positions(model: Any, inputs: Mapping[str, Any]) -> Tensor:  # (B, L), (axes, B, L)
    """Rotary position ids that `generate()` gives a whole prompt; several axes with M-RoPE."""
    hints = {name: value for name, value in inputs.items() if value is not None}
    ids = hints.pop("input_ids")
    hints = {"attention_mask": torch.ones_like(ids), **hints, CACHE_NAME: None}
    found: Tensor = model._prepare_position_ids_for_generation(ids, hints)
    return found


_GRIDS = ("image", "video")


def position_ids_are_generated(
    model: Any, inputs: Mapping[str, Any], unseen: Collection[str]
) -> bool:
    """Whether `position_ids` among inputs of a `custom_generate` hook are those of `generate()`.

    It makes them before it calls the hook where none were given, without the `unseen` inputs, so
    without images for M-RoPE. Others are the user's.
    """
    given = {n: one for n, one in inputs.items() if one is not None and n not in unseen}
    found = given.pop("position_ids", None)
    if found is None or model.config.is_encoder_decoder:
        return False
    source = given["input_ids"] if "input_ids" in given else given["inputs_embeds"]
    made = model._prepare_position_ids_for_generation(source, given)
    return made.shape == found.shape and bool((made == found).all())


def prepare_next_inputs(
    model: Any, inputs: Mapping[str, Any], prepared: Mapping[str, Any], out: Any
) -> dict[str, Any]:
    """The inputs of the step of `generate()` after a prompt; its token repeats the prompt's last.

    `prepared` are the arguments of the first forward, `out` its output.
    """
    kept = {name: value for name, value in inputs.items() if value is not None}
    ids = kept.pop("input_ids")
    kept.setdefault("attention_mask", torch.ones_like(ids))
    kept["position_ids"] = prepared.get("position_ids")
    kept = model._update_model_kwargs_for_generation(out, kept, is_encoder_decoder=False)
    longer = torch.cat((ids, ids[:, -1:]), 1)
    kept |= {"next_sequence_length": 1, "use_cache": True}
    step = model.prepare_inputs_for_generation(longer, **kept)
    return {name: value for name, value in step.items() if value is not None}


def score_stepwise(
    model: Any, inputs: Mapping[str, Any], continuation: Tensor
) -> Tensor:  # (B, 1 + n, V)
    """Logits of `generate()` after a prompt and after each of the tokens `continuation` (B, n).

    One forward for the prompt and one per token, with a cache of the library. `inputs` are those
    of the first forward; `input_ids` are the decoder's, absent for a prompt of embeddings.
    """
    given = {name: value for name, value in inputs.items() if value is not None}
    ids, embeds = given.pop("input_ids", None), given.get("inputs_embeds")
    source: Any = embeds if ids is None else ids
    ids = source.new_zeros((len(source), 0), dtype=torch.int64) if ids is None else ids
    encoded, names = bool(model.config.is_encoder_decoder), forward_names(model)
    cache: Any = DynamicCache(config=model.config.get_text_config(decoder=True))
    if encoded:
        cache = EncoderDecoderCache(cache, DynamicCache(config=model.config))
    else:
        seen = torch.ones(source.shape[:2], dtype=torch.int64, device=source.device)
        given.setdefault("attention_mask", seen)
        if "position_ids" not in given and "position_ids" in names:
            hints = {**given, CACHE_NAME: None}
            given["position_ids"] = model._prepare_position_ids_for_generation(source, hints)
    given |= {cache_name(model): cache, "use_cache": True}
    given |= {**({"logits_to_keep": 1} if "logits_to_keep" in names else {})}
    scores = []
    for step in range(continuation.shape[1] + 1):
        prepared = model.prepare_inputs_for_generation(
            ids,
            next_sequence_length=1 if step else None,
            is_first_iteration=not step,
            **given,
        )
        out = model(**prepared, return_dict=True)
        scores.append(out.logits[:, -1])
        given = model._update_model_kwargs_for_generation(out, given, is_encoder_decoder=encoded)
        ids = torch.cat((ids, continuation[:, step : step + 1]), 1)
    return torch.stack(scores, 1)


def make_bos_prompt(model: Any, config: GenerationConfig, inputs: Mapping[str, Any]) -> Tensor:
    """The prompt (B, 1) of `generate()` without `input_ids`: BOS, a row per row of `inputs`."""
    given = {name: value for name, value in inputs.items() if value is not None}
    made = model._maybe_initialize_input_ids_for_generation(None, config.bos_token_id, given)
    assert isinstance(made, Tensor)
    return made.to(model.device)


def infer_mask(
    model: Any, ids: Tensor, config: GenerationConfig | None = None
) -> Tensor | None:  # (B, L)
    """The attention mask that `generate()` infers from padding in `ids` (B, L).

    None where nothing is padded or padding is ambiguous: no pad token, or one that also ends a
    sequence. `config` is a prepared one; default: the model's own.
    """
    if config is None:
        config = merge_config(model, None, {})
        set_special_tokens(model, config, ids.device, len(ids), has_mask=True)  # it only warns
    mask: Tensor = model._prepare_attention_mask_for_generation(ids, config, {})
    return None if bool(mask.all()) else mask


def encode_source(model: Any, inputs: Mapping[str, Any]) -> Any:
    """The encoder outputs of a request to an encoder-decoder, images in the prompt included."""
    given = {name: value for name, value in inputs.items() if value is not None}
    config = model.generation_config
    source, name, kept = model._prepare_model_inputs(None, config.bos_token_id, given)
    made = model._maybe_prepare_encoder_kwargs_for_generation(source, kept, name, config)
    return made["encoder_outputs"]


def encode_guided_text(
    model: Any, inputs: Mapping[str, Any], guidance: float
) -> tuple[Tensor, Tensor]:
    """States (B, L, D) of a text encoder and their mask; with guidance, null text rows follow."""
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask
    config = deepcopy(model.generation_config)
    config.guidance_scale = guidance
    made = model._prepare_text_encoder_kwargs_for_generation(
        ids, {"attention_mask": mask}, "input_ids", config
    )
    return made["encoder_outputs"].last_hidden_state, made["attention_mask"]


def encode_melody(model: Any, inputs: Mapping[str, Any], guidance: float) -> tuple[Tensor, None]:
    """The prefix of the frames of MusicGen Melody (B, L, D): chroma and text, and a null prefix."""
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    given = {**inputs, "attention_mask": torch.ones_like(ids) if mask is None else mask}
    config = deepcopy(model.generation_config)
    config.guidance_scale = guidance
    made = model._prepare_encoder_hidden_states_kwargs_for_generation(
        ids, given, "input_ids", config
    )
    return made["encoder_hidden_states"], None


def encoder_input_names(model: Any) -> frozenset[str]:
    """Arguments of `generate()` that only the image encoders of a decoder read."""
    whole = unwrap_compiled(model).base_model
    makers = (getattr(whole, f"get_{kind}_features", None) for kind in _GRIDS)
    return frozenset().union(*(_names_of(own.__func__) for own in makers if own is not None))


def encode_media(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Run the image encoders; their outputs replace the pixels (`mm_encoder_outputs`)."""
    encoded = model._prepare_multimodal_encoder_kwargs_for_generation(dict(inputs))
    assert isinstance(encoded, dict)
    return encoded
