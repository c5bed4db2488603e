"""Settings of `synthesize` for frames: sampling and length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

from mmspec import _hf
from mmspec.distributions.sampling import Sampling
from mmspec.errors import check_flag, check_number
from mmspec.modalities.speech.codecs import Codec
from mmspec.targets.frames.frames import FrameSettings
from mmspec.targets.tokens.generation_settings import infer_do_sample

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
OWN = ("max_new_tokens", "seconds", "guidance", "do_sample", *SAMPLING)
# fields of a generation configuration that are not supported, and their neutral values
NEUTRAL = {
    **dict.fromkeys(("num_beams", "num_return_sequences", "repetition_penalty"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "min_length", "epsilon_cutoff", "eta_cutoff"), 0),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "sequence_bias"), None),
    **dict.fromkeys(("begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"), None),
    **dict.fromkeys(("exponential_decay_length_penalty", "max_time", "stop_strings"), None),
    **dict.fromkeys(("top_h", "watermarking_config", "penalty_alpha", "dola_layers"), None),
    **dict.fromkeys(("prompt_lookup_num_tokens",), None),
    **{"encoder_repetition_penalty": 1, "encoder_no_repeat_ngram_size": 0, "use_cache": True},
    **dict.fromkeys(("token_healing", "is_assistant"), False),
}


def parse_frame_settings(reader: Any, codec: Codec, given: Mapping[str, Any]) -> FrameSettings:
    """The given settings, with defaults of the model's own `generate()`.

    Raises ValueError for values out of range, and for fields of the generation configuration that
    are not supported.
    """
    config = reader.model.generation_config
    depth = getattr(reader.model, "depth_decoder", None)
    _check_neutral(reader.model, config, {"min_new_tokens": 0})  # a depth decoder has its own
    sampling = infer_do_sample(
        {name: given[name] for name in SAMPLING if given.get(name) is not None}
    )
    if given.get("do_sample") is not None:
        check_flag("do_sample", given["do_sample"])
        sampling = {"do_sample": given["do_sample"], **sampling}
    guidance = _guidance(reader.model, config, given.get("guidance"), depth)
    return FrameSettings(
        _sampling(reader.model, config, sampling, reader.min_temperature),
        _sampling(depth, depth.generation_config, sampling) if depth is not None else Sampling(),
        _max_new_tokens(reader, codec, config, given),
        guidance,
        _top_k(reader.model, config, given),
    )


def _guidance(model: Any, config: GenerationConfig, given: Any, depth: Any) -> float:
    """The scale of guidance as given, else of the configuration; 1 = none.

    Raises ValueError below 1, where `generate()` fails, and for a model without guidance.
    """
    name, name_of_own = type(model).__name__, "guidance_scale of the generation configuration"
    if given is not None:
        check_number("guidance", given, 1, example=3)
    elif config.guidance_scale is not None:
        check_number(f"{name_of_own} of {name}", config.guidance_scale, 1, example=3)
    scale = config.guidance_scale if given is None else given
    if depth is not None:
        if scale not in (None, 1):
            source = name_of_own if given is None else "guidance"
            raise ValueError(f"{source}={scale}: {name} has no guidance; give guidance=1")
        _check_neutral(depth, depth.generation_config, {"guidance_scale": 1})
    return float(1 if scale is None else scale)


def _top_k(model: Any, config: GenerationConfig, given: Mapping[str, Any]) -> int:
    """The top-k of guidance, which greedy decoding has too; 0 = none."""
    values = (given.get("top_k"), config.top_k, _hf.get_default_settings(model).get("top_k"))
    return int(next((one for one in values if one is not None), 0))


def _sampling(
    model: Any, config: GenerationConfig, given: Mapping[str, Any], min_temperature: float = 0.0
) -> Sampling:
    """Sampling of one model: as given, else of its configuration, else of transformers.

    `generate()` of a model with a `min_temperature` replaces lower ones. Raises ValueError for a
    lower one that is given.
    """
    usual = _hf.get_default_settings(model)
    _check_neutral(model, config, NEUTRAL)
    do_sample = given.get("do_sample", bool(config.do_sample))
    if not do_sample:
        return Sampling()
    own = {name: getattr(config, name, None) for name in SAMPLING}
    defaults = {name: usual.get(name) if value is None else value for name, value in own.items()}
    made = {**defaults, **{name: value for name, value in given.items() if name in SAMPLING}}
    if made["temperature"] < min_temperature:
        if "temperature" in given:
            raise ValueError(
                f"temperature={made['temperature']}: generate() of {type(model).__name__} replaces "
                f"temperatures below {min_temperature:g} by it; give at least that, or 0 for greedy"
            )
        made["temperature"] = min_temperature
    return Sampling(do_sample=True, **{n: value for n, value in made.items() if value is not None})


def _check_neutral(model: Any, config: GenerationConfig, fields: Mapping[str, Any]) -> None:
    usual = _hf.get_default_settings(model)
    for name, neutral in fields.items():
        value = getattr(config, name, None)
        if value not in (None, neutral, usual.get(name)):
            raise ValueError(
                f"{name}={value} of the generation configuration of {type(model).__name__} is not "
                "supported for frames; reset it, or use model.generate()"
            )


def sampling_arguments(sampling: Sampling) -> dict[str, Any]:
    """The arguments of `generate()` for the same sampling."""
    if not sampling.do_sample:
        return {"do_sample": False}
    return {"do_sample": True, **{name: getattr(sampling, name) for name in SAMPLING}}


def _max_new_tokens(
    reader: Any, codec: Codec, config: GenerationConfig, given: Mapping[str, Any]
) -> int:
    """The length limit. Raises ValueError if there is none, or for less than one frame."""
    limit, seconds = given.get("max_new_tokens"), given.get("seconds")
    if limit is not None and seconds is not None:
        raise ValueError("max_new_tokens= and seconds= both limit the length; give one")
    if seconds is not None:
        limit = reader.steps(codec.frames(seconds))
    if limit is None:
        limit = config.max_new_tokens
        if limit is None and config.max_length is not None:
            limit = reader.remaining_tokens(config.max_length, given)
        if limit is None:
            raise ValueError("nothing limits the length; give max_new_tokens= or seconds=")
    check_number("max_new_tokens", limit, reader.min_tokens, whole=True, example=500)
    return int(limit)
