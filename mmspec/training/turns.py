"""Turns of a conversation: texts, marks of images and clips, and calls of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mmspec.errors import format_value, parse_json
from mmspec.training.media import IMAGE, VIDEO

ROLES = {
    **dict.fromkeys(("human",), "user"),
    **dict.fromkeys(("gpt", "bing", "chatgpt", "model"), "assistant"),
    **dict.fromkeys(("observation", "function", "ipython"), "tool"),
    "developer": "system",
}
CALL = "function_call"  # role of a call in ShareGPT's format
FIELDS = ("tool_calls", "tool_call_id", "name", "reasoning_content")  # for chat templates
_KNOWN = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Mark:
    """The position of an image or a clip; `value` is what a part names, None = named elsewhere."""

    kind: str
    value: Any = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One message: its texts and marks, and what else a chat template reads of it."""

    role: str  # system, user, assistant or tool
    parts: tuple[str | Mark, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """All texts of the turn."""
        return "".join(part for part in self.parts if isinstance(part, str))

    def with_parts(self, parts: tuple[str | Mark, ...]) -> Turn:
        """The turn with other parts."""
        return replace(self, parts=parts)


def read_turns(row: Mapping[str, Any], has_videos: bool) -> list[Turn]:
    """Read the turns of a row; <video> in a text is a mark if the row names videos.

    Raises ValueError for a row of another form.
    """
    messages = _messages(row)
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            "has neither a prompt nor messages nor conversations but "
            f"{', '.join(map(str, row)) or 'nothing'}; write it as in docs/training.md"
        )
    kinds = (IMAGE, VIDEO) if has_videos else (IMAGE,)
    turns = [_turn(one, kinds) for one in messages]
    system = row.get("system")
    if not isinstance(system, str | None):
        raise ValueError("has a system that is not text; give text")
    if system and turns[0].role == "system" and turns[0].text != system:
        raise ValueError("has two system texts; keep one of them")
    own = (
        [Turn("system", (_check_unicode(system),))] if system and turns[0].role != "system" else []
    )
    return [*own, *turns]


def _messages(row: Mapping[str, Any]) -> Any:
    """The messages of a row. Raises ValueError for two that contradict each other."""
    lists = [row[name] for name in ("messages", "conversations") if row.get(name) is not None]
    prompt = row.get("prompt")
    if len(lists) > 1:
        raise ValueError("has messages and conversations; keep one of them")
    if not lists and isinstance(prompt, str):
        answer = row.get("answer")
        pair = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        return pair if answer is not None else pair[:1]
    if lists and isinstance(prompt, str) and isinstance(lists[0], list):
        contents = [one.get("content", one.get("value")) for one in lists[0] if _is_object(one)]
        if prompt not in contents:
            raise ValueError("has a prompt that is none of its messages; keep one of them")
    return lists[0] if lists else None


def read_tools(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Schemas of the tools of a row. Raises ValueError for what is no list of objects."""
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = _parse(tools) if tools.strip() else None
    if tools is None:
        return ()
    if not isinstance(tools, list) or not all(
        _is_object(one) and _is_object(one.get("function", one)) for one in tools
    ):
        raise ValueError("has tools that are not a list of schemas; write them as OpenAI does")
    _check_unicode(json.dumps(tools, ensure_ascii=False))
    return tuple(tools)


def _turn(message: Any, kinds: tuple[str, ...]) -> Turn:
    """Read one turn, of text with marks or a list of parts."""
    if not _is_object(message):
        raise ValueError("has a turn that is not an object; write it as in docs/training.md")
    given = message.get("role") or message.get("from")
    content = message.get("content", message.get("value"))
    if given == CALL:
        return Turn("assistant", (), {"tool_calls": [_call(_parse(content))]})
    role = ROLES.get(str(given), str(given))
    if role not in _KNOWN:
        raise ValueError(f"has a turn of {format_value(role)}; roles are {', '.join(_KNOWN)}")
    fields = {name: message[name] for name in FIELDS if message.get(name) is not None}
    if "tool_calls" in fields:
        fields["tool_calls"] = _calls(fields["tool_calls"], role)
        content = "" if content is None else content
    if fields:
        _check_unicode(json.dumps(fields, ensure_ascii=False))
    if isinstance(content, str):
        return Turn(role, tuple(_split_at_marks(content, kinds)), fields)
    if not isinstance(content, list):
        raise ValueError("has a turn whose content is not text; give text or parts")
    return Turn(role, tuple(part for one in content for part in _part(one, kinds)), fields)


def _part(one: Any, kinds: tuple[str, ...]) -> Iterator[str | Mark]:
    kind = one.get("type") if _is_object(one) else None
    if kind == "text" and isinstance(one.get("text"), str):
        yield from _split_at_marks(one["text"], kinds)
    elif kind in (IMAGE, VIDEO):
        values = (one.get(name) for name in (kind, "path", "url"))
        yield Mark(kind, next((value for value in values if value is not None), None))
    elif kind in ("image_url", "video_url") and one.get(kind) is not None:
        yield Mark(kind.removesuffix("_url"), one[kind])
    else:
        raise ValueError(
            f"has a part of type {format_value(kind)}; parts are text, image, image_url, video and "
            "video_url"
        )


def _calls(value: Any, role: str) -> list[Any]:
    if role != "assistant" or not isinstance(value, list) or not value:
        raise ValueError("has tool_calls that are no list of an assistant; write them as OpenAI")
    return [_call(one) for one in value]


def _call(value: Any) -> dict[str, Any]:
    """A call as chat templates read it, with arguments as an object."""
    inner: Any = value.get("function", value) if _is_object(value) else None
    if not _is_object(inner) or not isinstance(inner.get("name"), str):
        raise ValueError("has a call of a tool without the name of a function; write it as OpenAI")
    arguments = inner.get("arguments")
    arguments = _parse(arguments) if isinstance(arguments, str) else arguments
    named = {
        "name": _check_unicode(inner["name"]),
        "arguments": {} if arguments is None else arguments,
    }
    own = {"id": value["id"]} if value.get("id") is not None else {}
    return {**own, "type": "function", "function": named}


def _parse(text: Any) -> Any:
    """Parse the JSON of a call or of tools. Raises ValueError for another text."""
    try:
        return parse_json(text)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"has a call or tools that are not JSON ({error}); correct them"
        ) from error


def _split_at_marks(text: str, kinds: tuple[str, ...]) -> Iterator[str | Mark]:
    """Split a text at its marks; line breaks next to a mark are removed."""
    pieces = re.split(f"<({'|'.join(kinds)})>", _check_unicode(text))
    for at in range(0, len(pieces), 2):
        if at:
            yield Mark(pieces[at - 1])
        chunk = pieces[at].removeprefix("\n") if at else pieces[at]
        chunk = chunk.removesuffix("\n") if at + 2 < len(pieces) else chunk
        if chunk:
            yield chunk


def _check_unicode(text: str) -> str:
    """Return the text. Raises ValueError for half of a surrogate pair, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"has text that is not Unicode ({error.reason}); correct it") from error
    return text


def _is_object(one: Any) -> bool:
    return isinstance(one, Mapping)
