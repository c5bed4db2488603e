"""Requests of the chat completions API: what is honoured, and what is refused with its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from mmspec.distributions.grammar import Grammar
from mmspec.errors import check_number, format_value, is_among, prefix_errors, unknown_message
from mmspec.serving.media import Fetch, read_url

MAX_CHOICES = 16
MAX_STOPS = 4
SOUND_FORMATS = ("wav", "mp3", "flac", "ogg")
MAX_ALTERNATIVES = 20  # of `top_logprobs`
ROLES = ("system", "developer", "user", "assistant")
# generation settings beside those of the API, as other servers take them
EXTRA_SETTINGS = ("top_k", "min_p", "repetition_penalty", "min_new_tokens")
HARMLESS = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {  # values that change nothing; the reason
    "frequency_penalty": ((0, 0.0), "give repetition_penalty, which transformers has"),
    "presence_penalty": ((0, 0.0), "give repetition_penalty, which transformers has"),
    "logit_bias": (({},), "drop it"),
    "tools": (([],), "the model's text is returned as it is; describe the tools in the prompt"),
    "tool_choice": (("none", "auto"), "no tools are called; drop it"),
    "functions": (([],), "no functions are called; drop it"),
    "modalities": ((["text"],), "this model writes text"),
    "audio": ((), "this model writes text"),
    "prediction": ((), "drafts are those of the server's recipe"),
}


class InvalidRequest(ValueError):
    """A request that is refused: the client has to change it (400)."""


@dataclass(frozen=True)
class Part:
    """A piece of a turn: text, or the bytes of an image, a clip or a sound."""

    kind: str  # "text", "image", "video", "audio"
    text: str = ""
    data: bytes = b""


@dataclass(frozen=True)
class Turn:
    """One message of a conversation."""

    role: str
    parts: tuple[Part, ...]


class ChatModel(Protocol):
    """Turns conversations into inputs, and tokens into text; of a modality's module `serving`."""

    tokenizer: Any

    def make_inputs(self, turns: Sequence[Turn]) -> dict[str, Tensor]:
        """Input tensors (1, L) of `generate`. Raises ValueError for media it does not read."""


@dataclass(frozen=True)
class ChatRequest:
    """A checked request of `/v1/chat/completions`."""

    turns: tuple[Turn, ...]
    settings: Mapping[str, Any]  # generation settings
    choices: int = 1
    stops: tuple[str, ...] = ()
    seed: int | None = None
    alternatives: int | None = None  # of each token's log-probability; None = not requested
    streams: bool = False
    streams_usage: bool = False
    grammar: Grammar | None = None  # of `response_format`
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, body: Any, default_tokens: int, fetch: Fetch | None = None) -> ChatRequest:
        """Check a body. Raises InvalidRequest naming the first field that is not honoured.

        `fetch` reads media from network addresses; without it only data URLs are read.
        """
        try:
            return _parse(body, default_tokens, fetch)
        except InvalidRequest:
            raise
        except ValueError as error:
            raise InvalidRequest(str(error)) from error


def _parse(body: Any, default_tokens: int, fetch: Fetch | None) -> ChatRequest:
    if not isinstance(body, Mapping):
        raise InvalidRequest("the body is not a JSON object; send one with messages")
    known = (
        *("model", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "n"),
        *("stop", "stream", "stream_options", "seed", "logprobs", "top_logprobs"),
        *("response_format", *EXTRA_SETTINGS, *HARMLESS, *NEUTRAL),
    )
    given = {name: value for name, value in body.items() if value is not None}
    if unknown := sorted(set(given) - set(known)):
        raise InvalidRequest(unknown_message(unknown, known, "/v1/chat/completions"))
    for name, (values, why) in NEUTRAL.items():
        if name in given and not is_among(given[name], values):
            raise InvalidRequest(f"{name}={format_value(given[name])} is not supported: {why}")
    options = given.get("stream_options", {})
    if not isinstance(options, Mapping) or set(options) - {"include_usage", "include_obfuscation"}:
        raise InvalidRequest(
            f"stream_options={format_value(options)} is not known; give {{'include_usage': true}}"
        )
    return ChatRequest(
        turns=_parse_messages(given.get("messages"), fetch),
        settings=_parse_settings(given, default_tokens),
        choices=_number(given, "n", 1, 1, MAX_CHOICES),
        stops=_parse_stops(given.get("stop")),
        seed=_number(given, "seed", None, -(1 << 63), (1 << 63) - 1),
        alternatives=_parse_logprobs(given),
        streams=_flag(given, "stream"),
        streams_usage=_flag(options, "include_usage"),
        grammar=_parse_format(given.get("response_format", {"type": "text"})),
    )


def _parse_settings(given: Mapping[str, Any], default_tokens: int) -> dict[str, Any]:
    names = [name for name in ("max_completion_tokens", "max_tokens") if name in given]
    limit = _number(given, names[0], None, 1, 1 << 20) if names else default_tokens
    temperature, top_p = given.get("temperature", 1.0), given.get("top_p", 1.0)
    check_number("temperature", temperature, 0, 2, example=0.7)
    check_number("top_p", top_p, 0, 1, example=0.9)
    check_number("min_p", given.get("min_p", 0), 0, 1, example=0.1)
    check_number("top_k", given.get("top_k", 0), 0, whole=True, example=50)
    made: dict[str, Any] = {"max_new_tokens": limit}
    made |= {name: given[name] for name in EXTRA_SETTINGS if name in given}
    if temperature == 0 or top_p == 0:
        for name in ("top_k", "min_p"):
            made.pop(name, None)
        return {**made, "do_sample": False}
    # the model's own top-k does not apply unless it is given
    return {"top_k": 0, **made, "do_sample": True, "temperature": temperature, "top_p": top_p}


def _parse_format(given: Any) -> Grammar | None:
    """The grammar of a JSON mode; None for plain text."""
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar.json_schema({"type": "object"})
    named = given.get("json_schema") if kind == "json_schema" else None
    if not isinstance(named, Mapping) or not isinstance(named.get("schema"), Mapping):
        raise InvalidRequest(
            f"response_format={format_value(given)} is not known; give {{'type': 'text'}}, "
            "{'type': 'json_object'} or {'type': 'json_schema', 'json_schema': {'name': ..., "
            "'schema': {...}}}"
        )
    with prefix_errors("response_format"):
        return Grammar.json_schema(named["schema"])


def _parse_logprobs(given: Mapping[str, Any]) -> int | None:
    count: int = _number(given, "top_logprobs", 0, 0, MAX_ALTERNATIVES)
    if not _flag(given, "logprobs"):
        if "top_logprobs" in given and count:
            raise InvalidRequest(f"top_logprobs={count} needs logprobs=true; give both")
        return None
    return count


def _parse_stops(given: Any) -> tuple[str, ...]:
    stops = [] if given is None else [given] if isinstance(given, str) else given
    is_list = isinstance(stops, list) and all(isinstance(one, str) and one for one in stops)
    if not is_list or len(stops) > MAX_STOPS:
        raise InvalidRequest(
            f"stop={format_value(given)} is not a text or a list of up to {MAX_STOPS} texts; give "
            "some, such as ['\\n']"
        )
    return tuple(stops)


def _parse_messages(given: Any, fetch: Fetch | None) -> tuple[Turn, ...]:
    if not isinstance(given, list) or not given:
        raise InvalidRequest(
            "messages is missing or empty; give [{'role': 'user', 'content': '...'}]"
        )
    turns = []
    for index, message in enumerate(given):
        where = f"messages[{index}]"
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ROLES:
            raise InvalidRequest(
                f"{where}.role={format_value(role)} is not known; give {', '.join(ROLES)}"
            )
        content = message.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, list) or not parts:
            raise InvalidRequest(f"{where}.content is neither a text nor a list of parts; give one")
        read = [_parse_part(f"{where}.content[{i}]", one, fetch) for i, one in enumerate(parts)]
        turns.append(Turn("system" if role == "developer" else role, tuple(read)))
    if turns[-1].role != "user":
        raise InvalidRequest(
            f"the last message has role {turns[-1].role}; end with one of the user to respond to"
        )
    return tuple(turns)


def _parse_part(where: str, part: Any, fetch: Fetch | None) -> Part:
    kind = part.get("type") if isinstance(part, Mapping) else None
    value = part.get(kind) if isinstance(kind, str) else None
    if kind == "text" and isinstance(value, str):
        return Part("text", value)
    if kind in ("image_url", "video_url", "audio_url"):
        url = value.get("url") if isinstance(value, Mapping) else value
        return Part(kind.removesuffix("_url"), data=read_url(where, url, fetch))
    if kind == "input_audio" and isinstance(value, Mapping):
        return Part("audio", data=_read_audio(f"{where}.input_audio", value))
    raise InvalidRequest(
        f"{where} is {format_value(part)}; give a part of type text, image_url, video_url, "
        "audio_url or input_audio"
    )


def _read_audio(where: str, value: Mapping[str, Any]) -> bytes:
    """The bytes of a sound file; what they hold is found when it is read."""
    if value.get("format") not in SOUND_FORMATS:
        raise InvalidRequest(
            f"{where}.format={format_value(value.get('format'))} is not known; give one of "
            f"{', '.join(SOUND_FORMATS)}"
        )
    data = value.get("data")
    if not isinstance(data, str):
        raise InvalidRequest(f"{where}.data={format_value(data)} is not base64 text; give some")
    return read_url(f"{where}.data", f"data:audio/x;base64,{data}", None)


def _number(given: Mapping[str, Any], name: str, default: Any, least: int, most: int) -> Any:
    if name in given:
        check_number(name, given[name], least, most, whole=True)
    return given.get(name, default)


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name}={format_value(value)} must be true or false")
    return value
