"""What is asked of `synthesize` of frames: how codes are drawn, and how many there may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

from mmspec import _hf
from mmspec.distributions.sampling import Sampling
from mmspec.errors import check_flag, check_number
from mmspec.modalities.speech.codecs import Codec
from mmspec.targets.frames.frames import FrameSettings
from mmspec.targets.tokens.generation_settings import sampled

DRAWN = ("temperature", "top_k", "top_p", "min_p", "typical_p")
OWN = ("max_new_tokens", "seconds", "guidance", "do_sample", *DRAWN)
# what a configuration may say that is not honoured, and the value that asks for nothing
UNKNOWN = {
    **dict.fromkeys(("num_beams", "num_return_sequences", "repetition_penalty"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "min_length", "epsilon_cutoff", "eta_cutoff"), 0),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "sequence_bias"), None),
}


def settings(reader: Any, codec: Codec, given: Mapping[str, Any]) -> FrameSettings:
    """Settings as the model's own `generate()` has them where nothing is said.

    Raises ValueError for what is out of range, and for entries of its configuration that change
    codes in another way.
    """
    config = reader.model.generation_config
    depth = getattr(reader.model, "depth_decoder", None)
    said = sampled({name: given[name] for name in DRAWN if given.get(name) is not None})
    if given.get("do_sample") is not None:
        check_flag("do_sample", given["do_sample"])
        said = {"do_sample": given["do_sample"], **said}
    own = config.guidance_scale
    guidance = given.get("guidance")
    if guidance is not None:
        check_number("guidance", guidance, 1, example=3)
        if depth is not None and guidance != 1:
            raise ValueError(f"guidance={guidance}: {type(reader.model).__name__} has no guidance")
    scale = own if guidance is None else guidance
    return FrameSettings(
        _sampling(reader.model, config, said),
        _sampling(depth, depth.generation_config, said) if depth is not None else Sampling(),
        _most(reader, codec, config, given),
        float(scale or 1),
    )


def _sampling(model: Any, config: GenerationConfig, said: Mapping[str, Any]) -> Sampling:
    """How one model draws: as is said, as its configuration has it, as transformers does."""
    usual = _hf.default_settings(model)
    for name, neutral in UNKNOWN.items():
        value = getattr(config, name, None)
        if value not in (None, neutral, usual.get(name)):
            raise ValueError(
                f"{name}={value} of the generation configuration of {type(model).__name__} is not "
                "honoured for frames; take it out, or use model.generate()"
            )
    do_sample = said.get("do_sample", bool(config.do_sample))
    if not do_sample:
        return Sampling()
    told = {name: getattr(config, name, None) for name in DRAWN}
    held = {name: usual.get(name) if value is None else value for name, value in told.items()}
    made = {**held, **{name: value for name, value in said.items() if name in DRAWN}}
    return Sampling(do_sample=True, **{n: value for n, value in made.items() if value is not None})


def drawn(sampling: Sampling) -> dict[str, Any]:
    """The arguments of `generate()` that draw so."""
    if not sampling.do_sample:
        return {"do_sample": False}
    return {"do_sample": True, **{name: getattr(sampling, name) for name in DRAWN}}


def _most(reader: Any, codec: Codec, config: GenerationConfig, given: Mapping[str, Any]) -> int:
    """New tokens at most. Raises ValueError where nobody says, and for less than one frame."""
    asked, seconds = given.get("max_new_tokens"), given.get("seconds")
    if asked is not None and seconds is not None:
        raise ValueError("max_new_tokens= and seconds= both say how long to speak; give one")
    if seconds is not None:
        asked = reader.steps(codec.frames(seconds))
    if asked is None:
        asked = config.max_new_tokens
        if asked is None and config.max_length is not None:
            asked = reader.left(config.max_length, given["input_ids"])
        if asked is None:
            raise ValueError("nothing limits the sound; give max_new_tokens= or seconds=")
    check_number("max_new_tokens", asked, reader.least, whole=True, example=500)
    return int(asked)
