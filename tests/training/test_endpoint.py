"""Servers that answer, later, never, or nonsense."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image

from mmspec.training.conversations import Question
from mmspec.training.endpoint import ChatEndpoint, RequestRefused, chat_request
from mmspec.training.media import IMAGE, VIDEO, Media
from mmspec.training.turns import Mark, Turn
from tests.toys.chat_server import chat_server, completion

ASKED = [{"role": "user", "content": "what?"}]
LIMITS = {"timeout_s": 0.4, "tries": 3, "pause_s": 0.01}


def ask(reply: Callable[[Any, Any], Any], **limits: Any) -> Any:
    with chat_server(reply) as url:
        endpoint = ChatEndpoint(url, **{**LIMITS, **limits}).with_model()
        return endpoint.complete(messages=ASKED, max_tokens=7, seed=3)


def test_a_request_has_the_model_and_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    seen: list[Any] = []

    def reply(body: Any, handler: Any) -> Any:
        seen.append((body, handler.path, handler.headers["Authorization"]))
        return completion("a star", 3, "length")

    found = ask(reply)
    assert (found.text, found.is_cut, found.num_tokens, found.num_prompt_tokens) == (
        *("a star", True, 3),
        None,
    )
    sent = {"model": "target", "messages": ASKED, "max_tokens": 7, "seed": 3}
    assert seen == [(sent, "/v1/chat/completions", "Bearer secret")]


@pytest.mark.parametrize("failures", [[503], [429, 500], ["close"], ["hang", 502]])
def test_busy_servers_and_broken_connections_are_tried_again(failures: list[Any]) -> None:
    left = [*failures]

    def reply(_: Any, handler: Any) -> Any:
        if not left:
            return completion("at last")
        now = left.pop(0)
        if now == "hang":
            time.sleep(0.6)
        if isinstance(now, str):
            handler.connection.close()
            return None
        return now

    assert ask(reply).text == "at last"


def _trickle(_: Any, handler: Any) -> None:
    """A byte now and then, each in time."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(30):
        try:
            handler.wfile.write(b" ")
            handler.wfile.flush()
        except OSError:
            return
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("reply", "kind", "said"),
    [
        (lambda *_: 503, ConnectionError, r"gave no answer in 3 tries .*\(503 no\); start the"),
        (lambda *_: time.sleep(0.7), ConnectionError, r"\(timed out\); .*--endpoint-timeout"),
        (_trickle, ConnectionError, "timed out"),
        (lambda *_: 401, ValueError, "answers 401 no; correct --endpoint, .*OPENAI_API_KEY"),
        (lambda *_: 404, ValueError, "answers 404 no; correct --endpoint"),
        (lambda *_: 400, RequestRefused, "refuses the request: 400 no"),
        (lambda *_: b"<html>", ValueError, "'<html>', which is no chat completion; give"),
        (lambda *_: b"\xff\xfe", ValueError, "which is no chat completion"),
        (lambda *_: [1], ValueError, r"answers '\[1\]', which is no chat completion"),
        (lambda *_: {"choices": []}, ValueError, "which is no chat completion"),
        (lambda *_: {"choices": [{"message": {}}]}, ValueError, "which is no chat completion"),
        (lambda *_: completion(7), ValueError, "which is no chat"),  # type: ignore[arg-type]
        (lambda *_: completion("a", None, "tool_calls"), RequestRefused, "by 'tool_calls'"),
    ],
)
def test_what_is_no_answer_is_one_error(
    reply: Callable[[Any, Any], Any], kind: type[Exception], said: str
) -> None:
    start = time.monotonic()
    with pytest.raises(kind, match=said) as caught:
        ask(reply)
    assert isinstance(caught.value, RequestRefused) is (kind is RequestRefused)
    assert time.monotonic() - start < 4


def test_a_server_that_is_not_there_and_several_models() -> None:
    nowhere = ChatEndpoint("http://127.0.0.1:9/v1", **LIMITS)  # type: ignore[arg-type]
    with pytest.raises(ConnectionError, match=r"gave no answer in 3 tries .*refused"):
        nowhere.with_model()
    with chat_server(lambda *_: completion("a"), ("big", "small")) as url:
        with pytest.raises(ValueError, match="serves big, small; give --endpoint-model one"):
            ChatEndpoint(url).with_model()
        assert ChatEndpoint(url, "small").with_model().complete(messages=ASKED).text == "a"
    stopped = replace(nowhere, model="a", pause_s=30.0)
    stopped.stopped.set()  # as after the error of another request
    with pytest.raises(ConnectionError):
        stopped.complete(messages=ASKED)


@pytest.mark.parametrize("url", ["", "host:8000", "ftp://host", "http://", "http://h/v1?a=b"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not an http"):
        ChatEndpoint(url)


def test_the_messages_of_a_question() -> None:
    """Images are PNG data URLs at the places of their marks; tools and their calls are OpenAI's."""
    opened = [Image.new("RGB", (5, 4), colour) for colour in ("white", "red")]
    mark, tool = Mark(IMAGE), {"type": "function", "function": {"name": "look"}}
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
    turns = (
        Turn("system", ("be brief.",)),
        Turn("user", (mark, "and", mark, "?")),
        Turn("assistant", ("",), {"tool_calls": [call]}),
        Turn("tool", ("a star",), {"name": "look"}),
        Turn("user", ("why?",)),
    )
    images = (Media(IMAGE, "a.png"), Media(IMAGE, "b.png"))
    question = Question(turns, images, None, "rows:1", 0, (), (tool,))
    found = chat_request(question, opened)
    assert found["tools"] == [tool]
    system, user, called, returned, last = found["messages"]
    assert system == {"role": "system", "content": "be brief."}
    assert called["tool_calls"] == [
        {**call, "function": {"name": "look", "arguments": '{"at": 1}'}}
    ]
    assert returned == {"role": "tool", "content": "a star", "name": "look"}
    assert last == {"role": "user", "content": "why?"}
    first, text, second, end = user["content"]
    assert (text, end) == ({"type": "text", "text": "and"}, {"type": "text", "text": "?"})
    for part, image in zip((first, second), opened, strict=True):
        kind, _, content = part["image_url"]["url"].partition(";base64,")
        assert kind == "data:image/png"
        assert Image.open(io.BytesIO(base64.b64decode(content))).tobytes() == image.tobytes()
    with pytest.raises(RequestRefused, match="videos are not sent to an endpoint"):
        chat_request(replace(question, videos=(Media(VIDEO, "a.mp4"),)), opened)
