"""A target that answers elsewhere: chat completions of an OpenAI-compatible server.

    endpoint = ChatEndpoint("http://127.0.0.1:8000/v1")
    endpoint.complete(**chat_request(question, images), max_tokens=128)

`urllib` alone: the timeouts of clients are of single reads, and a server that sends a byte now and
then would never be given up.
"""

from __future__ import annotations

import base64
import io
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from typing import Any

from mmspec.errors import check_number, is_http_address, parse_json
from mmspec.training.conversations import Question

API_KEY = "OPENAI_API_KEY"  # environment variable
MAX_RESPONSE_BYTES = 64 << 20
RETRIED = frozenset((408, 425, 429, 500, 502, 503, 504))  # the same request may succeed later
REFUSED = frozenset((400, 413, 422))  # of one question, such as a prompt that is too long
MAX_PAUSE_S = 30.0


class RequestRefused(ValueError):
    """The server refuses one request, and may answer others."""


@dataclass(frozen=True)
class EndpointAnswer:
    """An answer of the server."""

    text: str
    is_cut: bool  # at the maximal number of tokens
    num_tokens: int | None  # as the server counts them, if it does
    num_prompt_tokens: int | None


@dataclass(frozen=True)
class ChatEndpoint:
    """An address that ends before /chat/completions, and how long it is waited for.

    Raises ValueError at construction for what is no address. A key is read from OPENAI_API_KEY.
    """

    url: str
    model: str | None = None  # None = the only one
    timeout_s: float = 300.0  # of one answer
    tries: int = 6
    pause_s: float = 0.5  # before the second try; doubles with each
    stopped: threading.Event = field(default_factory=threading.Event)  # no more tries

    def __post_init__(self) -> None:
        if not is_http_address(self.url):
            raise ValueError(
                f"--endpoint {self.url!r} is not an http(s) address; give one such as "
                "http://127.0.0.1:8000/v1"
            )
        check_number("--endpoint-timeout", self.timeout_s, 0.01, 86400, example=300)

    def with_model(self) -> ChatEndpoint:
        """The same with the name of its model. Raises ValueError where it serves several."""
        if self.model is not None:
            return self
        found = self._request("/models", None)
        try:
            names = [str(one["id"]) for one in found["data"]]
        except (TypeError, KeyError) as error:
            raise self._nonsense("/models", found) from error
        if len(names) != 1:
            raise ValueError(
                f"{self.url} serves {', '.join(names[:8]) or 'no model'}; give --endpoint-model "
                "one that is the target"
            )
        return replace(self, model=names[0])

    def complete(self, **request: Any) -> EndpointAnswer:
        """Request one answer; busy servers and broken connections are tried again.

        Raises RequestRefused for one request, ConnectionError for a server that does not answer in
        time, and ValueError for one whose responses are no chat completions.
        """
        body = {"model": self.model, **request}
        found = self._request("/chat/completions", json.dumps(body).encode())
        try:
            (choice,), usage = found["choices"], found.get("usage") or {}
            text, reason = choice["message"]["content"], choice.get("finish_reason")
            counts = [usage.get(name) for name in ("completion_tokens", "prompt_tokens")]
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise self._nonsense("/chat/completions", found) from error
        if not isinstance(text, str | None):
            raise self._nonsense("/chat/completions", found)
        if reason not in ("stop", "length", None):
            raise RequestRefused(f"{self.url} ended an answer by {reason!r}")
        sizes = [one if isinstance(one, int) else None for one in counts]
        return EndpointAnswer(text or "", reason == "length", *sizes)

    def _request(self, path: str, body: bytes | None) -> Any:
        """The JSON of a response, after as many tries as needed."""
        headers = {"Content-Type": "application/json"}
        if os.environ.get(API_KEY):
            headers["Authorization"] = f"Bearer {os.environ[API_KEY]}"
        request = urllib.request.Request(self.url.rstrip("/") + path, body, headers)
        content = None
        for number in range(1, self.tries + 1):
            wait = min(MAX_PAUSE_S, self.pause_s * 2 ** (number - 1))
            try:
                content = self._read(request)
                break
            except urllib.error.HTTPError as error:
                reason = f"{error.code} {_read_detail(error) or error.reason}"
                if error.code in REFUSED and body is not None:
                    raise RequestRefused(f"{self.url} refuses the request: {reason}") from error
                if error.code not in RETRIED:
                    raise ValueError(
                        f"{self.url}{path} answers {reason}; correct --endpoint, --endpoint-model "
                        f"or {API_KEY}, and repeat the command: it resumes"
                    ) from error
                wait = min(MAX_PAUSE_S, max(wait, _retry_after_s(error)))
            except (OSError, HTTPException) as error:  # no connection, a broken one, no time left
                reason = str(getattr(error, "reason", error)) or type(error).__name__
            if number == self.tries or self.stopped.wait(wait):
                break
        if content is None:
            raise ConnectionError(
                f"{self.url}{path} gave no answer in {self.tries} tries of at most "
                f"{self.timeout_s:g} s ({reason}); start the server, or give a longer "
                "--endpoint-timeout, and repeat the command: it resumes"
            )
        try:
            return parse_json(content)
        except ValueError as error:
            raise self._nonsense(path, content) from error

    def _read(self, request: urllib.request.Request) -> bytes:
        """The body of a response, within the time of an answer. Raises OSError."""
        end = time.monotonic() + self.timeout_s
        content = bytearray()
        with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
            while chunk := response.read1():
                content += chunk
                if len(content) > MAX_RESPONSE_BYTES:
                    raise self._nonsense("", f"more than {MAX_RESPONSE_BYTES} bytes")
                if time.monotonic() > end:
                    raise TimeoutError("timed out")
        return bytes(content)

    def _nonsense(self, path: str, found: Any) -> ValueError:
        shown = found[:200].decode(errors="replace") if isinstance(found, bytes) else repr(found)
        return ValueError(
            f"{self.url}{path} answers {shown[:200]!r}, which is no chat completion; give "
            "--endpoint the address of an OpenAI-compatible server, such as "
            "http://127.0.0.1:8000/v1, and repeat the command: it resumes"
        )


def chat_request(question: Question, images: Sequence[Any]) -> dict[str, Any]:
    """The turns of a question as messages, with its images (PIL) as data URLs, and its tools.

    Raises RequestRefused for videos, for which servers have no common form.
    """
    if question.videos:
        raise RequestRefused("videos are not sent to an endpoint; drop --endpoint for this data")
    left = iter(images)
    messages = []
    for turn in question.turns:
        fields = dict(turn.fields)
        if "tool_calls" in fields:
            fields["tool_calls"] = list(map(_format_call, fields["tool_calls"]))
        content: Any = turn.text
        if not all(isinstance(part, str) for part in turn.parts):
            content = [
                {"type": "text", "text": part}
                if isinstance(part, str)
                else {"type": "image_url", "image_url": {"url": _data_url(next(left))}}
                for part in turn.parts
            ]
        messages.append({"role": turn.role, "content": content, **fields})
    return {"messages": messages, **({"tools": list(question.tools)} if question.tools else {})}


def _format_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call of a tool with its arguments as text."""
    own = call["function"]
    return {**call, "function": {**own, "arguments": json.dumps(own["arguments"])}}


def _data_url(image: Any) -> str:
    """The pixels that the target reads: PNG, without transparency and orientation."""
    stream = io.BytesIO()
    image.save(stream, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


def _retry_after_s(error: urllib.error.HTTPError) -> float:
    value = error.headers.get("Retry-After") or ""
    return float(value) if value.isdigit() else 0.0


def _read_detail(error: urllib.error.HTTPError) -> str:
    try:
        return " ".join(error.read(500).decode(errors="replace").split())
    except OSError:  # the connection broke within the body
        return ""
