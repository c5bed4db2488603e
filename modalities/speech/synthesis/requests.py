"""Arguments of `generate` from those of `synthesize`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from mmspec.distributions.repetition import RepetitionAware
from mmspec.errors import check_flag, check_number, format_value, refuse_fixed
from mmspec.modalities.common.tokens import BoundTokens, first_id
from mmspec.modalities.speech.codecs import Codec
from mmspec.modalities.speech.synthesis.layout import SpeechCodes

OWN = ("text", "voice", "seconds", "repetition_aware")
FIXED = ("suppress_tokens", "eos_token_id", "max_length")  # set by the vocabulary layout
OUTPUT_FLAGS = ("return_dict_in_generate", "output_scores", "output_logits")
SAMPLING = (
    "max_new_tokens",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
)  # defaults differ from generate()


def prepare_request(
    bound: BoundTokens,
    codec: Codec,
    layout: SpeechCodes,
    load_tokenizer: Callable[[], Any],
    args: Sequence[Any],
    arguments: Mapping[str, Any],
) -> dict[str, Any]:
    """Arguments of `generate`. Raises ValueError for texts and settings that are not supported."""
    if len(args) > 1 or (args and "text" in arguments):
        raise ValueError("synthesize() takes one positional argument; give the rest by name")
    given = {**({"text": args[0]} if args else {}), **arguments}
    why = "the vocabulary layout sets codes and their end; give codes= to accelerate()"
    refuse_fixed(given, FIXED, "synthesize()", why)
    refuse_fixed(given, OUTPUT_FLAGS, "synthesize()", "it returns waveforms; use generate()")
    given = {**_read_config(given.get("generation_config")), **given}
    own = {name: given.pop(name, None) for name in OWN}
    inputs = _inputs(
        layout, load_tokenizer, own["text"], own["voice"], given, bound.backbone.device
    )
    length = inputs["input_ids"].shape[1]
    return {
        **given,
        **inputs,
        **_prepare_sampling(given, bound.model.generation_config, own["repetition_aware"]),
        "max_new_tokens": _max_codes(
            bound, codec, length, given.get("max_new_tokens"), own["seconds"]
        ),
        "eos_token_id": layout.end,
        "suppress_tokens": layout.suppressed_ids(bound.backbone.vocabulary),
        "pad_token_id": first_id(bound.model.config.pad_token_id, layout.end),
    }


def _read_config(config: GenerationConfig | None) -> dict[str, Any]:
    """Sampling fields of a generation configuration of the request."""
    if not isinstance(config, GenerationConfig):
        return {}
    return {name: one for name in SAMPLING if (one := getattr(config, name)) is not None}


def _inputs(
    layout: SpeechCodes,
    load_tokenizer: Callable[[], Any],
    text: Any,
    voice: Any,
    given: Mapping[str, Any],
    device: torch.device,
) -> dict[str, Tensor]:
    """Prompts (B, L), padded on the left, and their attention mask."""
    ids = given.get("input_ids")
    if (text is None) == (ids is None):
        raise ValueError("give synthesize() a text, or input_ids of encoded prompts")
    if ids is not None:
        if voice is not None:
            raise ValueError("voice= needs a text; input_ids already contain the speaker")
        if (
            not isinstance(ids, Tensor)
            or ids.dim() != 2
            or not ids.shape[1]
            or bool((ids[:, -1] != layout.begin).any())
        ):
            raise ValueError(
                f"input_ids={format_value(ids)} must all end with id {layout.begin}, which begins "
                "speech; give (B, L), padded on the left"
            )
        mask = given.get("attention_mask")
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids) if mask is None else mask}
    texts = [text] if isinstance(text, str) else text
    if not isinstance(texts, list | tuple) or not texts:
        raise ValueError(
            f"text={format_value(text)} is neither a text nor a list of texts; give one"
        )
    refuse_fixed(given, ("attention_mask",), "synthesize()", "it goes with input_ids; drop it")
    voices = voice if isinstance(voice, list | tuple) else [voice] * len(texts)
    if len(voices) != len(texts):
        raise ValueError(
            f"{len(texts)} texts have {len(voices)} voices; give one for all, or one for each"
        )
    tokenizer = load_tokenizer()
    pairs = zip(texts, voices, strict=True)
    rows = [_prompt(layout, tokenizer, one, name) for one, name in pairs]
    return _pad_prompts(rows, layout.begin, device)


def _prompt(layout: SpeechCodes, tokenizer: Any, text: Any, voice: str | None) -> list[int]:
    """`[voice] text begin`. Raises ValueError for what is no text, or an empty one."""
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"text={format_value(text)} has no words to synthesize; give a sentence")
    voice_id = layout.voice_id(voice)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    unknown = getattr(tokenizer, "tokenizer", tokenizer).unk_token_id
    if unknown in ids:
        words = [one for one in text.split() if unknown in tokenizer(one)["input_ids"]]
        raise ValueError(
            f"text={format_value(text)}: the tokenizer does not know "
            f"{format_value(' '.join(words)) if words else 'all of it'}, which would be dropped; "
            "use other words"
        )
    if not ids:
        raise ValueError(f"text={text!r} has no word that the tokenizer knows; give a sentence")
    return [*([] if voice_id is None else [voice_id]), *ids, layout.begin]


def _pad_prompts(rows: list[list[int]], pad: int, device: torch.device) -> dict[str, Tensor]:
    width = max(map(len, rows))
    ids = [[pad] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    made = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    return {name: value.to(device) for name, value in made.items()}


def _max_codes(bound: BoundTokens, codec: Codec, length: int, limit: Any, seconds: Any) -> int:
    """The maximum number of codes; default: all remaining positions of the model."""
    positions = getattr(bound.model.config, "max_position_embeddings", None)
    remaining = None if positions is None else positions - length
    if remaining is not None and remaining < 1:
        raise ValueError(
            f"the prompt has {length} tokens, and {type(bound.model).__name__} has {positions} "
            "positions for prompt and speech; give a shorter text, or one sentence at a time"
        )
    if limit is not None and seconds is not None:
        raise ValueError("max_new_tokens= and seconds= both limit the length; give one")
    if seconds is not None:
        limit = codec.frames(seconds)
    if limit is None:
        if remaining is None:
            raise ValueError("nothing limits the length; give max_new_tokens= or seconds=")
        limit = remaining
    check_number("max_new_tokens", limit, 1, whole=True, example=500)
    if remaining is not None and limit > remaining:
        raise ValueError(
            f"{limit} codes do not fit: after {length} tokens of the prompt "
            f"{type(bound.model).__name__} has {remaining} of {positions} positions; give a "
            f"shorter text, or max_new_tokens={remaining}"
        )
    return int(limit)


def _prepare_sampling(given: Mapping[str, Any], config: Any, aware: Any) -> dict[str, Any]:
    """Sampling arguments, with defaults of the model's generation configuration.

    Sampling is the default even if the configuration is greedy, over all codes (`top_k` 0);
    `aware` adds repetition-aware sampling.
    """
    if given.get("do_sample") is not None:
        check_flag("do_sample", given["do_sample"])
    requested = {name: given.get(name) for name in ("temperature", "top_k", "top_p")}
    for name, value in requested.items():
        if value is not None:
            check_number(name, value)
    own = {"temperature": config.temperature, "top_p": config.top_p}
    warpers = {name: value for name in requested if (value := requested[name] or own.get(name))}
    greedy = given.get("do_sample") is False or given.get("temperature") == 0
    made: dict[str, Any] = {"do_sample": True, "top_k": given.get("top_k") or 0}
    if greedy:  # the model's own generate() refuses a temperature of 0
        made = {"do_sample": False, "temperature": 1.0}
    if aware is None:
        return made
    check_flag("repetition_aware", aware)
    if not aware:
        return made
    if greedy:
        raise ValueError(
            "repetition_aware=True resamples codes, and greedy decoding does not sample; give a "
            "temperature above 0, or drop it"
        )
    processors = [*(given.get("logits_processor") or ()), RepetitionAware(**warpers)]
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}  # applied by the processor
    return {**made, **neutral, "logits_processor": processors}
