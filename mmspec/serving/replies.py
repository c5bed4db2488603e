"""Replies of a web service: errors as the OpenAI API reports them, and streams of events."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from mmspec.errors import check_number, format_value, is_among, parse_json, unknown_message
from mmspec.serving.chat import InvalidRequest
from mmspec.serving.limits import MAX_WRITE_S, BodyRefused, read_body, within
from mmspec.serving.ticket import MemoryExceeded, QueueFull

EVENTS = "text/event-stream"
log = logging.getLogger("mmspec")


class ApiError(Exception):
    """An error as the API reports it."""

    def __init__(
        self, status: int, message: str, kind: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.headers = status, kind, dict(headers or {})


def parse_body(body: bytes) -> Any:
    """Parse a JSON body. Raises InvalidRequest."""
    try:
        return parse_json(body.decode())
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON ({error}); send a JSON object") from None


def check_model(body: Any, name: str) -> None:
    """Refuse another model than the one that is served (404). Raises ApiError."""
    asked = body.get("model") if isinstance(body, Mapping) else None
    if asked is not None and asked != name:
        raise ApiError(404, f"model {asked!r} is not served; give {name!r}", "model_not_found")


async def read_fields(
    request: Any,
    max_bytes: int,
    name: str,
    known: Sequence[str],
    choices: Mapping[str, Sequence[Any]],
) -> dict[str, Any]:
    """The fields of a JSON body for the model of that name.

    Raises InvalidRequest for others, and for other values than `choices` where it has some.
    """
    body = parse_body(await read_body(request, max_bytes))
    if not isinstance(body, Mapping):
        raise InvalidRequest("the body is not a JSON object; send one")
    given = {name: value for name, value in body.items() if value is not None}
    check_names(given, known, choices)
    check_model(given, name)
    return given


def check_names(
    given: Mapping[str, Any], known: Sequence[str], choices: Mapping[str, Sequence[Any]]
) -> None:
    """Refuse unknown fields, and other values than `choices`. Raises InvalidRequest."""
    if unknown := sorted(set(given) - set(known)):
        raise InvalidRequest(unknown_message(unknown, known, "this route"))
    for name, values in choices.items():
        if name in given and not is_among(given[name], values):
            shown = " or ".join(map(repr, values))
            raise InvalidRequest(
                f"{name}={format_value(given[name])} is not made here; give {shown}"
            )


def parse_text(body: Mapping[str, Any], name: str) -> str:
    """A field that is a text. Raises InvalidRequest for others, and for an empty one."""
    value = body.get(name)
    if not isinstance(value, str) or not value.strip():
        raise InvalidRequest(f"{name}={format_value(value)} is no text; give one")
    return value


def parse_whole(
    given: Mapping[str, Any], name: str, least: int, most: int, default: int = 1
) -> int:
    """A field that is a whole number. Raises InvalidRequest."""
    value = given.get(name, default)
    try:
        check_number(name, value, least, most, whole=True)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
    return int(value)


def describe_error(error: Exception) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and headers of an error."""
    status, kind, message, headers = 500, "server_error", "the server failed", dict[str, str]()
    if isinstance(error, ApiError):
        status, kind, message, headers = error.status, error.kind, str(error), error.headers
    elif isinstance(error, BodyRefused):
        status, kind, message = error.status, "invalid_request_error", str(error)
    elif isinstance(error, QueueFull):
        status, kind, message = 429, "rate_limit_exceeded", str(error)
        headers = {"retry-after": str(math.ceil(error.retry_after_s))}
    elif isinstance(error, MemoryExceeded):
        status, kind, message = 413, "invalid_request_error", str(error)
    elif isinstance(error, InvalidRequest):
        status, kind, message = 400, "invalid_request_error", str(error)
    elif isinstance(error, TimeoutError):
        status, kind, message = 504, "timeout", str(error)
        headers = {"x-should-retry": "false"}  # the official client would send it again at once
    else:
        log.error("a request failed", exc_info=error)
        message = f"the server failed ({type(error).__name__})"
    return status, {"error": {"message": message, "type": kind, "code": kind}}, headers


def make_error(error: Exception) -> Any:
    from starlette.responses import JSONResponse

    status, body, headers = describe_error(error)
    return JSONResponse(body, status_code=status, headers=headers)


def make_event(content: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return f"data: {json.dumps(content)}\n\n".encode()


def stream_events(events: AsyncIterator[bytes]) -> Any:
    """A response of events; see `stream_chunks`."""
    return stream_chunks(events, EVENTS)


def stream_chunks(chunks: AsyncIterator[bytes], media_type: str) -> Any:
    """A response in chunks; a client that takes nothing for `MAX_WRITE_S` loses it."""
    from starlette.responses import StreamingResponse

    class Chunks(StreamingResponse):
        async def stream_response(self, send: Any) -> None:
            async def send_in_time(message: Any) -> None:
                await within(send(message), MAX_WRITE_S)

            async with aclosing(chunks):  # type: ignore[type-var]
                await super().stream_response(send_in_time)

    return Chunks(chunks, media_type=media_type, headers={"cache-control": "no-store"})


async def run_while_connected(request: Any, step: Coroutine[Any, Any, Any]) -> Any:
    """The result of a step, which is cancelled where the client goes away (499)."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.create_task(step), asyncio.create_task(watch())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client has gone away", "client_closed_request")
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
