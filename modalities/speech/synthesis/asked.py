"""What is asked of `synthesize`, in terms of `generate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from mmspec.distributions.repetition import RepetitionAware
from mmspec.errors import check_flag, check_number, described, refuse_fixed
from mmspec.modalities.common.tokens import BoundTokens, first
from mmspec.modalities.speech.codecs import Codec
from mmspec.modalities.speech.synthesis.layout import SpeechCodes

OWN = ("text", "voice", "seconds", "repetition_aware")
FIXED = ("suppress_tokens", "eos_token_id", "max_length")  # the layout of the vocabulary says them
RETURNED = ("return_dict_in_generate", "output_scores", "output_logits")
SAID = ("max_new_tokens", "do_sample", "temperature", "top_k", "top_p")  # ours where nobody does


def prepare(
    bound: BoundTokens,
    codec: Codec,
    layout: SpeechCodes,
    words: Callable[[], Any],
    args: Sequence[Any],
    arguments: Mapping[str, Any],
) -> dict[str, Any]:
    """Arguments of `generate`. Raises ValueError for what cannot be spoken."""
    if len(args) > 1 or (args and "text" in arguments):
        raise ValueError("synthesize() takes the text by place, once, and the rest by name")
    given = {**({"text": args[0]} if args else {}), **arguments}
    why = (
        "what is said and what ends it is the layout of the vocabulary; give codes= to accelerate()"
    )
    refuse_fixed(given, FIXED, "synthesize()", why)
    refuse_fixed(given, RETURNED, "synthesize()", "it returns sound; use generate()")
    given = {**_said(given.get("generation_config")), **given}
    own = {name: given.pop(name, None) for name in OWN}
    inputs = _inputs(layout, words, own["text"], own["voice"], given, bound.backbone.device)
    length = inputs["input_ids"].shape[1]
    return {
        **given,
        **inputs,
        **_drawn(given, bound.model.generation_config, own["repetition_aware"]),
        "max_new_tokens": _room(bound, codec, length, given.get("max_new_tokens"), own["seconds"]),
        "eos_token_id": layout.end,
        "suppress_tokens": layout.others(bound.backbone.vocabulary),
        "pad_token_id": first(bound.model.config.pad_token_id, layout.end),
    }


def _said(config: GenerationConfig | None) -> dict[str, Any]:
    """What a configuration of the request says of that which we decide otherwise."""
    if not isinstance(config, GenerationConfig):
        return {}
    return {name: one for name in SAID if (one := getattr(config, name)) is not None}


def _inputs(
    layout: SpeechCodes,
    words: Callable[[], Any],
    text: Any,
    voice: Any,
    given: Mapping[str, Any],
    device: torch.device,
) -> dict[str, Tensor]:
    """Prompts (B, L), padded on the left, and their mask."""
    ids = given.get("input_ids")
    if (text is None) == (ids is None):
        raise ValueError("give synthesize() a text, or input_ids of prompts that are read already")
    if ids is not None:
        if voice is not None:
            raise ValueError("voice= goes with a text; input_ids hold their speaker already")
        if (
            not isinstance(ids, Tensor)
            or ids.dim() != 2
            or bool((ids[:, -1] != layout.begin).any())
        ):
            raise ValueError(
                f"input_ids={described(ids)} do not all end with id {layout.begin}, behind which "
                "the model speaks; give (B, L) that do, padded on the left"
            )
        mask = given.get("attention_mask")
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids) if mask is None else mask}
    texts = [text] if isinstance(text, str) else text
    if not isinstance(texts, list | tuple) or not texts:
        raise ValueError(f"text={described(text)} is neither a text nor a list of texts; give one")
    refuse_fixed(given, ("attention_mask",), "synthesize()", "it goes with input_ids")
    voices = voice if isinstance(voice, list | tuple) else [voice] * len(texts)
    if len(voices) != len(texts):
        raise ValueError(
            f"{len(texts)} texts have {len(voices)} voices; give one for all, or one for each"
        )
    read = words()
    pairs = zip(texts, voices, strict=True)
    return _padded([_prompt(layout, read, one, who) for one, who in pairs], layout.begin, device)


def _prompt(layout: SpeechCodes, words: Any, text: Any, voice: str | None) -> list[int]:
    """`[voice] text begin`. Raises ValueError for what is no text, or an empty one."""
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"text={text!r} has no words to speak; give some")
    who = layout.voice(voice)
    ids: list[int] = words(text, add_special_tokens=False)["input_ids"]
    unknown = getattr(words, "tokenizer", words).unk_token_id
    if unknown in ids:
        strange = [one for one in text.split() if unknown in words(one)["input_ids"]]
        raise ValueError(
            f"text={text!r}: the tokenizer does not know {' '.join(strange) or 'all of it'}, which "
            "would be passed over; say it in other words"
        )
    if not ids:
        raise ValueError(f"text={text!r} has no word that the tokenizer knows; give some")
    return [*([] if who is None else [who]), *ids, layout.begin]


def _padded(rows: list[list[int]], pad: int, device: torch.device) -> dict[str, Tensor]:
    width = max(map(len, rows))
    ids = [[pad] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    made = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    return {name: value.to(device) for name, value in made.items()}


def _room(bound: BoundTokens, codec: Codec, length: int, asked: Any, seconds: Any) -> int:
    """Codes to speak at most: as many as the model has places for, if nothing is said."""
    most = getattr(bound.model.config, "max_position_embeddings", None)
    left = None if most is None else most - length
    if left is not None and left < 1:
        raise ValueError(
            f"the text has {length} tokens with what stands around it, and "
            f"{type(bound.model).__name__} has {most} places for it and its speech; give a shorter "
            "one, or one sentence at a time"
        )
    if asked is not None and seconds is not None:
        raise ValueError("max_new_tokens= and seconds= both say how long to speak; give one")
    if seconds is not None:
        asked = codec.frames(seconds)
    if asked is None:
        if left is None:
            raise ValueError("nothing limits the speech; give max_new_tokens= or seconds=")
        asked = left
    check_number("max_new_tokens", asked, 1, whole=True, example=500)
    if left is not None and asked > left:
        raise ValueError(
            f"{asked} codes do not fit: behind {length} tokens of the prompt "
            f"{type(bound.model).__name__} has {left} of {most} places; give a shorter text, or "
            f"max_new_tokens={left}"
        )
    return int(asked)


def _drawn(given: Mapping[str, Any], config: Any, aware: Any) -> dict[str, Any]:
    """How codes are drawn: as the model's generation configuration says, but not greedily unless
    asked, and among all of them; away from repetitions if asked.
    """
    told = {name: given.get(name) for name in ("temperature", "top_k", "top_p")}
    own = {"temperature": config.temperature, "top_p": config.top_p}
    said = {name: value for name in told if (value := told[name] or own.get(name))}
    greedy = given.get("do_sample") is False or given.get("temperature") == 0
    made: dict[str, Any] = {"do_sample": True, "top_k": given.get("top_k") or 0}
    if greedy:  # the model's own generate() knows no temperature of 0
        made = {"do_sample": False, "temperature": 1.0}
    if aware is None:
        return made
    check_flag("repetition_aware", aware)
    if not aware:
        return made
    if greedy:
        raise ValueError(
            "repetition_aware=True redraws codes, and greedy decoding draws none; give a "
            "temperature above 0, or drop it"
        )
    processors = [*(given.get("logits_processor") or ()), RepetitionAware(**said)]
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}  # they are inside the distribution
    return {**made, **neutral, "logits_processor": processors}
