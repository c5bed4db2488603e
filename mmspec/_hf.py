"""Every private call into transformers' generation code, one thin function each.

`tests/test_hf_contracts.py` holds one contract test per function: when a release changes one of
these internals, that test names it. Nothing else in mmspec may call a private method of
transformers' `generate`.
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
    LogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin


@lru_cache(maxsize=1)
def default_config() -> GenerationConfig:
    """The library's empty config: its fields are the known generation settings."""
    return GenerationConfig()


def default_settings(model: Any) -> dict[str, Any]:
    """What `generate()` takes for settings that neither the user nor the model says."""
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
    """Turn the special token ids of `config` into tensors, in place: processors read those."""
    model._prepare_special_tokens(config, has_mask, device=device, batch_size=batch)


def decoder_prompt(
    model: Any, config: GenerationConfig, given: Tensor | None, batch: int, device: torch.device
) -> Tensor:  # (B, L)
    """What a decoder behind an encoder begins with: the start token, and what is `given`."""
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

    `default_max` and `default_min`: nobody set `max_length` / `min_length`. `prompt_length` counts
    ids: none of a prompt of `embeds` (B, L, D) alone, which the lengths count all the same.
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


def logits_processors(
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
    """The processors that `generate()` would run, in its order; `extra` are the user's own.

    `inputs` (B, L) is what the encoder penalties look at: the encoder's or the only prompt.
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
    """The processor as `row` sees it, for a batch of that row alone."""
    allowed = processor._prefix_allowed_tokens_fn
    return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), 1)


def stopping_criteria(
    model: Any,
    config: GenerationConfig,
    extra: Sequence[StoppingCriteria] = (),
    tokenizer: Any = None,
) -> StoppingCriteriaList:
    """The criteria that `generate()` would ask, in its order; `extra` are the user's own."""
    made = model._get_stopping_criteria(
        generation_config=config,
        stopping_criteria=StoppingCriteriaList(extra),
        tokenizer=tokenizer,
    )
    assert isinstance(made, StoppingCriteriaList)
    return made


def is_given(cache: Any) -> bool:
    """Whether a cache is the user's own, and not one that `generate()` has just made."""
    return bool(vars(cache).get("_is_user_defined"))


def mask_length(config: GenerationConfig) -> int | None:
    """Columns of the attention mask that `generate()` took away because it hid nothing."""
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
    """What a model's forward takes by name; `torch.compile` hides it behind (*args, **kwargs)."""
    forward = uncompiled(model).forward
    own = getattr(forward, "__func__", None)  # of the class; asked at every request
    return _names_of(forward) if own is None else _names_of(own) - {"self"}


@lru_cache(maxsize=256)
def _names_of(forward: Any) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def uncompiled(model: Any) -> Any:
    """The model that `torch.compile(model)` keeps as `_orig_mod`."""
    return dict(model.named_children()).get("_orig_mod", model)


def cache_name(model: Any) -> str:
    """The argument that a model takes its cache by."""
    names = forward_names(model)
    is_other = "cache_params" in names and "past_key_values" not in names
    return "cache_params" if is_other else "past_key_values"


def held(cache: Any) -> int:
    """Tokens that a cache tells to hold; recurrent layers alone do not count theirs."""
    return int(cache.get_seq_length()) if cache is not None and _counts(cache) else 0


def is_uncounted(cache: Any) -> bool:
    """Whether a cache holds states of recurrent layers only: nobody can tell of how many tokens."""
    states = (x for x in cache.layers if isinstance(x, LinearAttentionCacheLayerMixin))
    return not _counts(cache) and any(any(layer.has_previous_state.values()) for layer in states)


def _counts(cache: Any) -> bool:
    return any(isinstance(layer, CacheLayerMixin) for layer in cache.layers)


def prefill_inputs(
    model: Any, inputs: Mapping[str, Any], cache: Any, is_told: bool = False, scored: int = 1
) -> dict[str, Any]:
    """The arguments of the first forward, positions and first-iteration preparation included.

    `inputs` are the processor's tensors; `position_ids` may be among them already. With `is_told`
    their tokens begin with those that the cache holds, which are not read again. The last `scored`
    places are those whose logits are wanted.
    """
    given = {name: value for name, value in inputs.items() if value is not None}
    ids = given.pop("input_ids", None)
    mask = given.pop("attention_mask", None)
    start = held(cache)
    source = ids if ids is not None else given["inputs_embeds"]
    names = forward_names(model)
    is_taken = "position_ids" in names or "input_ids" not in names  # a wrapper names nothing
    if "position_ids" not in given and is_taken:
        # M-RoPE wants a mask: it knows the number of rows by it
        shape = (source.shape[0], source.shape[1] + (0 if is_told else start))
        seen = torch.ones(shape, dtype=torch.int64, device=source.device)
        # behind a cache M-RoPE goes by what the model noted last, unless the grids tell all
        grids = is_told and any(given.get(f"{kind}_grid_thw") is not None for kind in _GRIDS)
        known = None if grids or not start else cache
        hints = {
            **given,
            "attention_mask": seen if mask is None else mask,
            "past_key_values": known,
        }
        given["position_ids"] = model._prepare_position_ids_for_generation(source, hints)
    if mask is not None and bool(mask.all()):
        mask = None  # lets the kernel use its own causal mask
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


def prompt_positions(model: Any, inputs: Mapping[str, Any]) -> Tensor:  # (B, L), (axes, B, L)
    """The rotary positions that `generate()` gives a whole prompt; of axes where it is M-RoPE."""
    hints = {name: value for name, value in inputs.items() if value is not None}
    ids = hints.pop("input_ids")
    hints = {"attention_mask": torch.ones_like(ids), **hints, "past_key_values": None}
    found: Tensor = model._prepare_position_ids_for_generation(ids, hints)
    return found


_GRIDS = ("image", "video")


def position_ids_are_generated(
    model: Any, inputs: Mapping[str, Any], unseen: Collection[str]
) -> bool:
    """Whether `position_ids` among inputs of a `custom_generate` hook are those of `generate()`.

    It makes them before it calls the hook where nobody gave any, and without the inputs that it
    left `unseen`, so that a model with M-RoPE knew of no picture. Others are the user's.
    """
    given = {n: one for n, one in inputs.items() if one is not None and n not in unseen}
    found = given.pop("position_ids", None)
    if found is None or model.config.is_encoder_decoder:
        return False
    source = given["input_ids"] if "input_ids" in given else given["inputs_embeds"]
    made = model._prepare_position_ids_for_generation(source, given)
    return made.shape == found.shape and bool((made == found).all())


def next_inputs(
    model: Any, inputs: Mapping[str, Any], prepared: Mapping[str, Any], out: Any
) -> dict[str, Any]:
    """What `generate()` hands to the step behind a prompt; its token is the prompt's last again.

    `prepared` are the arguments of the first forward, `out` is what that gave.
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


def own_steps(model: Any, inputs: Mapping[str, Any], behind: Tensor) -> Tensor:  # (B, 1 + n, V)
    """The scores that `generate()` sees behind a prompt, and behind each of the tokens (B, n).

    One forward for the prompt and one per token, with the cache that the library makes. `inputs`
    are those of the first forward; `input_ids` are the decoder's, none of a prompt of embeddings.
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
            hints = {**given, "past_key_values": None}
            given["position_ids"] = model._prepare_position_ids_for_generation(source, hints)
    given |= {cache_name(model): cache, "use_cache": True}
    given |= {**({"logits_to_keep": 1} if "logits_to_keep" in names else {})}
    scores = []
    for step in range(behind.shape[1] + 1):
        prepared = model.prepare_inputs_for_generation(
            ids,
            next_sequence_length=1 if step else None,
            is_first_iteration=not step,
            **given,
        )
        out = model(**prepared, return_dict=True)
        scores.append(out.logits[:, -1])
        given = model._update_model_kwargs_for_generation(out, given, is_encoder_decoder=encoded)
        ids = torch.cat((ids, behind[:, step : step + 1]), 1)
    return torch.stack(scores, 1)


def inferred_mask(
    model: Any, ids: Tensor, config: GenerationConfig | None = None
) -> Tensor | None:  # (B, L)
    """The attention mask that `generate()` makes of padding in `ids` (B, L) where none is given.

    None where nothing is padded or padding cannot be told: no pad token, or one that also ends a
    sequence. `config` is a prepared one; without it the model's own answers.
    """
    if config is None:
        config = merge_config(model, None, {})
        set_special_tokens(model, config, ids.device, len(ids), has_mask=True)  # it only warns
    mask: Tensor = model._prepare_attention_mask_for_generation(ids, config, {})
    return None if bool(mask.all()) else mask


def encode_source(model: Any, inputs: Mapping[str, Any]) -> Any:
    """What the encoder of an encoder-decoder makes of a request, pictures among its words."""
    given = {name: value for name, value in inputs.items() if value is not None}
    config = model.generation_config
    source, name, kept = model._prepare_model_inputs(None, config.bos_token_id, given)
    made = model._maybe_prepare_encoder_kwargs_for_generation(source, kept, name, config)
    return made["encoder_outputs"]


def encode_guided_text(
    model: Any, inputs: Mapping[str, Any], guidance: float
) -> tuple[Tensor, Tensor]:
    """States (B, L, D) of a text encoder and their mask, and below them a null text if guided."""
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask
    config = deepcopy(model.generation_config)
    config.guidance_scale = guidance
    made = model._prepare_text_encoder_kwargs_for_generation(
        ids, {"attention_mask": mask}, "input_ids", config
    )
    return made["encoder_outputs"].last_hidden_state, made["attention_mask"]


def encode_melody(model: Any, inputs: Mapping[str, Any], guidance: float) -> tuple[Tensor, None]:
    """What stands before the frames of MusicGen Melody (B, L, D): chroma and text, a null one."""
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    given = {"attention_mask": torch.ones_like(ids) if mask is None else mask}
    config = deepcopy(model.generation_config)
    config.guidance_scale = guidance
    made = model._prepare_encoder_hidden_states_kwargs_for_generation(
        ids, given, "input_ids", config
    )
    return made["encoder_hidden_states"], None


def encoded_names(model: Any) -> frozenset[str]:
    """What `generate()` hands to the picture encoders of a decoder, and to nothing behind them."""
    whole = uncompiled(model).base_model
    makers = (getattr(whole, f"get_{kind}_features", None) for kind in _GRIDS)
    return frozenset().union(*(_names_of(own.__func__) for own in makers if own is not None))


def encode_media(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Run the picture encoders; their outputs replace the pixels (`mm_encoder_outputs`)."""
    encoded = model._prepare_multimodal_encoder_kwargs_for_generation(dict(inputs))
    assert isinstance(encoded, dict)
    return encoded
