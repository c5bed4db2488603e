"""Generation settings: merged as in `generate()`, checked, and refused if not supported."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor

from mmspec import _hf
from mmspec.distributions.sampling import DOUBLED, Sampling
from mmspec.errors import check_flag, check_number, format_value, nearest_name
from mmspec.targets.stop import check_seconds

SAMPLING_SETTINGS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
)


def infer_do_sample(settings: dict[str, Any]) -> dict[str, Any]:
    """Set `do_sample` if a sampling setting is given; temperature 0 means greedy."""
    names, temperature = (*SAMPLING_SETTINGS, "top_h"), settings.get("temperature")
    if temperature is not None:
        check_number("temperature", temperature)
    if settings.get("do_sample") is not None:
        check_flag("do_sample", settings["do_sample"])
    if temperature == 0:
        settings = {k: v for k, v in settings.items() if k not in names}
        return {**settings, "do_sample": False}
    if "do_sample" not in settings and any(settings.get(name) is not None for name in names):
        return {**settings, "do_sample": True}
    return settings


def resolve(
    model: Any,
    settings: Mapping[str, Any],
    prompt_length: int,
    device: torch.device,
    *,
    batch: int = 1,
    config: GenerationConfig | None = None,
    inputs: Tensor | None = None,
    embeds: Tensor | None = None,
    attention_mask: Tensor | None = None,
    processors: Sequence[LogitsProcessor] = (),
    prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
    honoured: Collection[str] = (),
) -> tuple[Sampling, GenerationConfig]:
    """Merge generation settings as `generate()`: settings > `config` > the model's own > defaults.

    `prompt_length` counts the ids of the padded decoder prompt. `inputs` (B, L) are the ids of the
    encoder penalties, `embeds` (B, L, D) a prompt of embeddings, and `attention_mask` (B, L) the
    mask of padding; all are optional. The returned config is resolved: lengths are absolute,
    special tokens are tensors. Settings of `honoured` are not refused.
    """
    _refuse_unknown(model, {**_entries(config), **settings})
    check_values({**({} if config is None else vars(config)), **settings})
    merged = _hf.merge_config(model, config, settings)
    refuse_modes(model, merged, honoured)
    _hf.set_special_tokens(model, merged, device, batch, attention_mask is not None)
    if attention_mask is None and inputs is not None and not model.config.is_encoder_decoder:
        attention_mask = _infer_mask(model, merged, inputs)
    if attention_mask is not None and bool((attention_mask == 1).all()):
        attention_mask = None  # as in generate(): no padding
    sources = (settings, {} if config is None else vars(config), vars(model.generation_config))
    merged = _hf.set_lengths(
        model,
        merged,
        prompt_length,
        default_max=all(entries.get("max_length") is None for entries in sources),
        default_min=all(entries.get("min_length") is None for entries in sources),
        embeds=embeds,
    )
    do_sample = bool(merged.do_sample)
    if do_sample and merged.temperature is not None:
        Sampling(do_sample=True, temperature=merged.temperature)  # raises our message
        merged.temperature = float(merged.temperature)
    made = _hf.make_logits_processors(
        model,
        merged,
        prompt_length,
        device,
        inputs=inputs,
        attention_mask=attention_mask,
        extra=processors,
        prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
    )
    return Sampling.from_processors(made, do_sample), merged


def check_callables(own: Mapping[str, Any]) -> None:
    """Check the arguments that are callables or objects. Raises ValueError."""
    for name in ("stopping_criteria", "logits_processor"):
        given = own.get(name)
        if given is not None and not (
            isinstance(given, list | tuple) and all(callable(one) for one in given)
        ):
            raise ValueError(
                f"{name}={format_value(given)} is not a list of functions; give one, as in "
                "transformers"
            )
    allowed, config = own.get("prefix_allowed_tokens_fn"), own.get("generation_config")
    if allowed is not None and not callable(allowed):
        raise ValueError(
            f"prefix_allowed_tokens_fn={allowed!r} cannot be called; give a function of a row and "
            "its ids"
        )
    if config is not None and not isinstance(config, GenerationConfig):
        raise ValueError(
            f"generation_config={format_value(config)} is none; give a GenerationConfig, or its "
            "settings by name"
        )
    try:
        assert own.get("streamer") is None or (own["streamer"].put and own["streamer"].end)
    except AttributeError:
        raise ValueError(
            f"streamer={format_value(own['streamer'])} lacks put() or end(); give a streamer of "
            "transformers"
        ) from None


def _infer_mask(model: Any, config: GenerationConfig, ids: Tensor) -> Tensor | None:
    """The mask inferred from padding; it must agree with that of the model's own config."""
    mask, own = _hf.infer_mask(model, ids, config), _hf.infer_mask(model, ids)
    same = mask is own if mask is None or own is None else torch.equal(mask, own)
    if not same:
        raise ValueError(
            f"input_ids hold pad_token_id={config.pad_token_id}, which is not the model's own "
            f"({model.generation_config.pad_token_id}), and no attention_mask tells padding from "
            "text; pass the tokenizer's attention_mask"
        )
    return mask


def check_values(settings: Mapping[str, Any]) -> None:
    """Check the range of values, some of which transformers ignores silently."""
    for name, value in settings.items():
        if value is not None and name in VALUE_CHECKS:
            VALUE_CHECKS[name](name, value)
    new = settings.get("max_new_tokens")
    if new is not None and new < 1:
        raise ValueError(f"max_new_tokens={new} leaves nothing to generate; give at least 1")
    names = ("top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
    Sampling(do_sample=True, **{n: settings[n] for n in names if settings.get(n) is not None})


def _entries(config: GenerationConfig | None) -> dict[str, Any]:
    """Entries of a user's configuration that are not fields of the library."""
    if config is None:
        return {}
    known = vars(_hf.get_default_config())
    return {name: value for name, value in vars(config).items() if name not in known}


def _refuse_unknown(model: Any, settings: Mapping[str, Any]) -> None:
    own = vars(_hf.get_default_config()).keys() | vars(model.generation_config).keys()
    known = own - {"transformers_version"}
    for name in settings:
        if name in _REFUSED_ARGUMENTS:
            raise ValueError(f"{name} is not a generation setting here: {_REFUSED_ARGUMENTS[name]}")
        if name not in known or name.startswith("_"):
            public = sorted(field for field in known if not field.startswith("_"))
            near = nearest_name(name, public)
            advice = f"did you mean {near}?" if near else f"known: {', '.join(public)}"
            raise ValueError(f"{name or repr(name)} is not a generation setting; {advice}")


def refuse_modes(model: Any, config: GenerationConfig, honoured: Collection[str] = ()) -> None:
    """Refuse unsupported modes and unknown fields, but for `honoured` ones. Raises ValueError.

    A configuration may have further entries, as Whisper's does: like `generate()`, this ignores
    them.
    """
    fields, neutral = vars(_hf.get_default_config()), _hf.get_default_settings(model)
    for name, value in vars(config).items():
        if name in (*HONOURED, *HARMLESS, *honoured) or name.startswith("_"):
            continue
        unset, why = REFUSED.get(name, (None, ""))
        is_neutral = isinstance(value, Real | str) and value in (unset, neutral.get(name))
        if value is None or is_neutral:
            continue
        if why:
            shown = format_value(value)
            raise ValueError(f"{name}={shown} (given, or the model's own) is not supported: {why}")
        if name in fields:
            raise ValueError(
                f"{name}={value} is not known here, so it would be ignored; drop it, or use "
                "model.generate()"
            )
    if config.get_generation_mode() == "contrastive_search":
        raise ValueError(
            f"penalty_alpha={config.penalty_alpha} selects contrastive search, which scores "
            "candidates against hidden states and cannot be speculated; pass penalty_alpha=None"
        )


def _whole(name: str, value: Any) -> None:
    check_number(name, value, -math.inf, whole=True)


def _positive(name: str, value: Any) -> None:
    check_number(name, value, 1e-8, example=1.1)


def _share(name: str, value: Any) -> None:
    check_number(name, value, 0, 1, example=0.4)


def _ngram(name: str, value: Any) -> None:
    check_number(name, value, 0, 65536, whole=True, example=3)  # its memory grows with it


def _one_id(name: str, value: Any) -> None:
    check_number(name, value, 0, whole=True)


def _count(name: str, value: Any) -> None:
    check_number(name, value, 1, whole=True)


def _ids(name: str, value: Any) -> None:
    """One id, or several."""
    if isinstance(value, Tensor):
        value = value.tolist()
    for one in value if isinstance(value, list | tuple) else (value,):
        _one_id(name, one)


def _id_list(name: str, value: Any) -> None:
    if not isinstance(value, list | tuple | Tensor):
        raise ValueError(f"{name}={value!r} is not a list of ids; give one, such as [5, 7]")
    _ids(name, value)


def _texts(name: str, value: Any) -> None:
    if not isinstance(value, str) and not all(
        isinstance(one, str) for one in _check_list(name, value)
    ):
        raise ValueError(f"{name}={value!r} is neither a text nor a list of texts; give one")


def _words(name: str, value: Any) -> None:
    for one in _check_list(name, value):
        _id_list(name, one)


def _decay(name: str, value: Any) -> None:
    pair = _check_list(name, value)
    if len(pair) != 2:
        raise ValueError(f"{name}={value!r} is not a start and factor; give both, such as (5, 1.1)")
    _one_id(name, pair[0])
    _positive(name, pair[1])


def _check_list(name: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name}={value!r} is not a list; give one")
    return value


# checks of settings whose range is not checked elsewhere; None is always "not set"
VALUE_CHECKS: Mapping[str, Callable[[str, Any], None]] = {
    **dict.fromkeys(("max_new_tokens", "max_length"), _whole),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), _count),
    **dict.fromkeys(("min_new_tokens", "min_length", "no_repeat_ngram_size"), _one_id),
    **dict.fromkeys(("forced_bos_token_id", "bos_token_id", "pad_token_id"), _one_id),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), _positive),
    **dict.fromkeys(
        ("temperature", "penalty_alpha", "guidance_scale", "length_penalty"), check_number
    ),
    **dict.fromkeys(("eos_token_id", "forced_eos_token_id", "decoder_start_token_id"), _ids),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), _id_list),
    **dict.fromkeys(("do_sample", "use_cache", "return_dict_in_generate"), check_flag),
    **dict.fromkeys(("output_scores", "output_logits", "output_attentions"), check_flag),
    **dict.fromkeys(
        ("output_hidden_states", "renormalize_logits", "remove_invalid_values"), check_flag
    ),
    **{"max_time": check_seconds, "top_h": _share, "encoder_no_repeat_ngram_size": _ngram},
    "bad_words_ids": _words,
    "exponential_decay_length_penalty": _decay,
    "stop_strings": _texts,
}

_LENGTH = "give the draft's length instead: accelerate(model, drafter=..., length=...)"
_REFUSED_ARGUMENTS = {
    "assistant_model": "give the small model to accelerate(model, drafter=...)",
    "assistant_tokenizer": "prepare it with the drafter: accelerate(model, drafter=...)",
    "negative_prompt_ids": DOUBLED,
    "negative_prompt_attention_mask": DOUBLED,
    "custom_generate": "call model.generate(..., custom_generate=...) instead",
    "synced_gpus": "one process decodes here; drop it",
    **dict.fromkeys(
        ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        _LENGTH,
    ),
    **dict.fromkeys(("num_speculative_tokens", "num_draft_tokens"), _LENGTH),
    "callback_on_step_end": "give on_round= a function, which is called with every Round",
}

# Every field of a GenerationConfig is in one of these tables; other fields are refused.
HONOURED = (
    *("bad_words_ids", "begin_suppress_tokens", "bos_token_id", "decoder_start_token_id"),
    *("do_sample", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "eos_token_id"),
    *("epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty", "forced_bos_token_id"),
    *("forced_eos_token_id", "max_length", "max_new_tokens", "max_time", "min_length"),
    *("min_new_tokens", "min_p", "no_repeat_ngram_size", "output_logits", "output_scores"),
    *("pad_token_id", "remove_invalid_values", "renormalize_logits"),
    *("repetition_penalty", "return_dict_in_generate", "sequence_bias", "stop_strings"),
    *("suppress_tokens", "temperature", "top_h", "top_k", "top_p", "typical_p"),
    "watermarking_config",
)
# These change no token: `generate()` reads them with beams or an assistant only, or for its own
# cache, which is not used here.
HARMLESS = (
    *("assistant_confidence_threshold", "assistant_ensemble_weight", "assistant_lookbehind"),
    *("disable_compile", "diversity_penalty", "early_stopping", "length_penalty", "low_memory"),
    *("max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule"),
    *("penalty_alpha", "speculation_type", "target_lookbehind", "transformers_version"),
)
_CACHE = "tokens are kept in a cache that can roll back; drop it, or pass past_key_values="
_PER_STEP = "a forward here reads several tokens at once and keeps no states of each; drop it"
_SELF = "choose a recipe that drafts so: accelerate(model, recipe=...)"
REFUSED: dict[str, tuple[Any, str]] = {  # the neutral value, and the reason or alternative
    "assistant_early_exit": (None, _SELF),
    "cache_config": (None, _CACHE),
    "cache_implementation": ("dynamic", _CACHE),
    "compile_config": (None, "compile the model itself: accelerate(torch.compile(model))"),
    "constraints": (None, "constraints need beam search; use prefix_allowed_tokens_fn"),
    "continuous_batching_config": (None, "batches are not rebuilt here; drop it"),
    "dola_layers": (None, "DoLa contrasts layers of every step; pass dola_layers=None"),
    "force_words_ids": (None, "constraints need beam search; use prefix_allowed_tokens_fn"),
    "guidance_scale": (1, f"{DOUBLED}; pass guidance_scale=None"),
    "is_assistant": (False, "a drafter is no assistant of generate(); drop it"),
    "max_cache_len": (None, _CACHE),
    "num_beam_groups": (1, "groups of beams need code of the hub; pass num_beam_groups=1"),
    "num_beams": (1, "a row follows one path here, not beams; pass num_beams=1"),
    "num_return_sequences": (1, "repeat the inputs instead and pass num_return_sequences=1"),
    "output_attentions": (False, _PER_STEP),
    "output_hidden_states": (False, _PER_STEP),
    "prefill_chunk_size": (None, "a prompt is read in one forward; drop it"),
    "prompt_lookup_num_tokens": (
        None,
        "that is a recipe here; drop it for accelerate(model, 'prompt-lookup', length=...)",
    ),
    "token_healing": (False, "it rewrites the prompt; drop it, and heal the prompt beforehand"),
    "use_cache": (
        True,
        "some classes predict other tokens without a cache; pass use_cache=True, or set it in the "
        "model's generation_config",
    ),
    "use_mtp": (False, _SELF),
}
