"""The official client against a real server on this machine, and clients that misbehave."""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest

from mmspec.cli.models import LoadedModels, load_models
from mmspec.cli.serve import ServerOptions, check_access, make_served
from mmspec.serving.app import Served, create_app
from mmspec.serving.limits import create_server
from mmspec.zoo import path

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
openai = pytest.importorskip("openai")

MODEL, TOKEN = "zoo:llava", "a-token-that-is-long-enough"
SCENE = Path(path("llava")).parents[1] / "scene.png"
PROMPT = "describe the picture"
WAV = {"data": "AAAA", "format": "wav"}
LONG = {"max_tokens": 300, "extra_body": {"min_new_tokens": 300}}


def options(**changes: Any) -> ServerOptions:
    usual: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "token": TOKEN, "max_requests": 4}
    usual |= {"max_slots": None, "max_queue": 8, "max_new_tokens": 64, "timeout_s": 60.0}
    return ServerOptions(**{**usual, "allow_urls": False, **changes})


class Server:
    """A server in a thread, and a client of it."""

    def __init__(self, served: Served) -> None:
        self.routes = cast(Any, served.routes)
        parts = getattr(self.routes, "parts", (self.routes,))
        service = getattr(parts[0], "service", None)  # of chat
        self.engine = cast(Any, None if service is None else service.engine)
        self.server = create_server(create_app(served, TOKEN), "127.0.0.1", 0)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.005)
        self.address = self.server.servers[0].sockets[0].getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=TOKEN, max_retries=0)

    def chat(self, messages: Any = None, **settings: Any) -> Any:
        given = {"temperature": 0, "max_tokens": 40, **settings}
        return self.client.chat.completions.create(
            model=MODEL, messages=question() if messages is None else messages, **given
        )

    def get(self, name: str, token: str = TOKEN) -> str:
        request = urllib.request.Request(
            f"{self.url}{name}", headers={"authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request, timeout=10) as reply:
            return str(reply.read().decode())

    def send(self, body: bytes, length: int | None = None, token: str = TOKEN) -> socket.socket:
        """Open a connection and send a request by hand."""
        made = socket.create_connection(self.address, timeout=10)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {token}\r\n"
        head += f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
        made.sendall(head.encode() + body)
        return made

    def is_idle(self) -> bool:
        return not self.engine.num_running and not self.engine.num_waiting

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join()


@pytest.fixture(scope="module")
def loaded() -> LoadedModels:
    return load_models(MODEL, "vlm", None, ["coupled"])


@contextmanager
def running(loaded: LoadedModels, **changes: Any) -> Iterator[Server]:
    server = Server(make_served(loaded, options(**changes)))
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def server(loaded: LoadedModels) -> Iterator[Server]:
    with running(loaded) as made:
        yield made


def data_url(kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(SCENE.read_bytes()).decode()}"


def question(text: str = PROMPT, url: str | None = None) -> list[dict[str, Any]]:
    image = {"type": "image_url", "image_url": {"url": url or data_url()}}
    return [{"role": "user", "content": [image, {"type": "text", "text": text}]}]


def wait_until(holds: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_picture_is_described_as_by_generate(server: Server, loaded: LoadedModels) -> None:
    formatter: Any = loaded.formatter
    from PIL import Image

    request = formatter.request([PROMPT], [Image.open(SCENE).convert("RGB")])
    expected = loaded.accelerate("coupled").generate(**{**request, "max_new_tokens": 40})
    text = formatter.text(expected)
    reply = server.chat()
    assert reply.choices[0].message.content == text
    assert reply.choices[0].finish_reason == "stop"
    usage = reply.usage
    assert usage.completion_tokens == expected.stats.num_new_tokens
    assert usage.prompt_tokens == request["input_ids"].shape[1]
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens == expected.stats.num_accepted_draft_tokens > 0


def test_a_stream_has_the_same_text_and_its_usage(server: Server) -> None:
    whole = server.chat()
    chunks = [*server.chat(stream=True, stream_options={"include_usage": True})]
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(filter(None, texts)) == whole.choices[0].message.content
    assert len(texts) > 3
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == whole.usage


def test_seeds_choices_and_log_probabilities(server: Server) -> None:
    settings = {"temperature": 1.0, "seed": 3, "n": 3, "max_tokens": 12, "logprobs": True}
    first, again = (server.chat(**settings, top_logprobs=2) for _ in range(2))
    texts = [one.message.content for one in first.choices]
    assert texts == [one.message.content for one in again.choices]
    assert len(set(texts)) > 1
    alone = server.chat(**{**settings, "n": 1})
    assert alone.choices[0].message.content == texts[0]
    assert first.choices[0].finish_reason == "length"
    content = first.choices[0].logprobs.content
    assert len(content) == 12
    assert all(one.logprob <= one.top_logprobs[0].logprob + 1e-6 for one in content)
    assert all(len(one.top_logprobs) == 2 for one in content)
    assert first.usage.completion_tokens == 36


@pytest.mark.parametrize("streams", [False, True])
def test_stop_texts_end_the_text_before_them(server: Server, streams: bool) -> None:
    whole = server.chat().choices[0].message.content
    stop = whole.split()[5][1:] + " "
    reply = server.chat(stop=[stop, "never"], stream=streams)
    if streams:
        parts = [chunk.choices[0] for chunk in reply]
        text, reason = "".join(p.delta.content or "" for p in parts), parts[-1].finish_reason
    else:
        text, reason = reply.choices[0].message.content, reply.choices[0].finish_reason
    assert text == whole[: whole.index(stop)]
    assert reason == "stop"


def test_many_clients_at_once_get_what_they_get_alone(server: Server) -> None:
    texts = [PROMPT, "what is in the center?", "how many things are there?"] * 2
    expected = {one: server.chat(question(one)).choices[0].message.content for one in set(texts)}
    found = dict[int, str]()

    def ask(index: int) -> None:
        found[index] = server.chat(question(texts[index])).choices[0].message.content

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(len(texts))] == [expected[one] for one in texts]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"response_format": {"type": "json_object"}}, "no token of this vocabulary"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools="),
        ({"temperature": 9}, "temperature=9"),
        ({"top_logprobs": 2}, "logprobs=true"),
        ({"n": 99}, "n=99"),
        ({"stop": ["a"] * 5}, "stop="),
        ({"presence_penalty": 0.5}, "presence_penalty=0.5"),
        *(
            ({name: False}, f"{name}=False")
            for name in ("frequency_penalty", "n", "seed", "temperature", "top_p", "max_tokens")
        ),
        ({"extra_body": {"top_k": True}}, "top_k=True"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "include_usage=1"),
        ({"extra_body": {"temprature": 1}}, "temperature"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages\\[0\\].role"),
        ({"messages": []}, "messages"),
        ({"messages": question(url="http://127.0.0.1:9/a.png")}, "allow-urls"),
        ({"messages": question(url="data:image/png;base64,AAAA")}, "not an image"),
        ({"messages": question(url="data:image/png;base64,A")}, "not base64"),
        (
            {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": "x"}]}]},
            "data URL",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "input_audio",
                                "input_audio": {"data": "AAAA", "format": "wav"},
                            }
                        ],
                    }
                ]
            },
            "no audio",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_what_is_not_honoured_is_refused(
    server: Server, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        server.chat(**given)
    assert server.is_idle()


def test_who_may_call_and_what_is_served(server: Server) -> None:
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with pytest.raises(openai.AuthenticationError):
        stranger.chat.completions.create(model=MODEL, messages=question())
    with pytest.raises(openai.NotFoundError, match="give 'zoo:llava'"):
        server.client.chat.completions.create(model="other", messages=question())
    assert [one.id for one in server.client.models.list()] == [MODEL]
    assert json.loads(server.get("/health", "wrong"))["status"] == "ok"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        server.get("/metrics", "wrong")


def test_other_paths_name_what_is_served(server: Server) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.get("/v1/audio/speech")
    assert caught.value.code == 404
    message = json.loads(caught.value.read())["error"]["message"]
    assert "/v1/audio/speech is not served for zoo:llava" in message
    assert "/v1/chat/completions" in message


def test_metrics_count_what_was_done(loaded: LoadedModels) -> None:
    with running(loaded) as server:
        usage = server.chat().usage
        server.chat(stream=True).close()
        found = dict(
            line.rsplit(" ", 1)
            for line in server.get("/metrics").splitlines()
            if not line.startswith("#")
        )
    details = usage.completion_tokens_details
    assert float(found["mmspec_request_seconds_count"]) >= 1
    assert float(found['mmspec_requests_total{outcome="completed"}']) >= 1
    accepted = float(found["mmspec_accepted_draft_tokens_total"])
    assert accepted >= details.accepted_prediction_tokens
    assert 0 < float(found["mmspec_acceptance_rate"]) <= 1
    assert float(found["mmspec_generated_tokens_total"]) >= usage.completion_tokens


def test_a_full_queue_is_429_with_a_time(loaded: LoadedModels) -> None:
    with running(loaded, max_requests=1, max_queue=0) as server:
        stream = server.chat(stream=True, **LONG)
        next(iter(stream))
        with pytest.raises(openai.RateLimitError, match="max_queue=0") as caught:
            server.chat()
        assert int(caught.value.response.headers["retry-after"]) >= 1
        stream.close()
        wait_until(server.is_idle)
        assert server.chat().choices[0].message.content


def test_a_client_that_goes_away_cancels_its_request(loaded: LoadedModels) -> None:
    with running(loaded) as server:
        stream = server.chat(stream=True, **LONG)
        next(iter(stream))
        stream.close()
        wait_until(server.is_idle)
        assert server.engine.counters.cancelled == 1
        body = {"model": MODEL, "messages": question(), "max_tokens": 300, "min_new_tokens": 300}
        connection = server.send(json.dumps(body).encode())
        wait_until(lambda: server.engine.num_running)
        connection.close()
        wait_until(server.is_idle)
        assert server.engine.counters.cancelled == 2
        assert server.engine.counters.completed == 0


def test_a_late_request_is_504(loaded: LoadedModels) -> None:
    with running(loaded, timeout_s=0.2) as server:
        with pytest.raises(openai.APIStatusError, match="in time") as caught:
            server.chat(**LONG)
        assert caught.value.status_code == 504
        assert "of at most 300 tokens" in str(caught.value)
        impatient = server.client.with_options(max_retries=2)
        with pytest.raises(openai.APIStatusError, match="in time"):
            impatient.chat.completions.create(
                model=MODEL, messages=question(), max_tokens=300, extra_body=LONG["extra_body"]
            )
        assert server.engine.counters.submitted == 2  # the client does not send it again


@pytest.mark.parametrize("body", [b"{", b"[1]", b"\xff\xfe", b"[" * 100_000], ids=range(4))
def test_bodies_that_are_no_request_are_400(server: Server, body: bytes) -> None:
    with server.send(body) as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 400")


def test_a_body_that_stalls_and_one_that_is_too_large(
    loaded: LoadedModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmspec.serving.limits.MAX_READ_S", 0.2)
    with running(loaded) as server:
        with server.send(b"{", 1000) as connection, suppress(ConnectionResetError):
            assert connection.recv(1000) == b""
        server.routes.__dict__["max_bytes"] = 10
        with server.send(b"x" * 100) as connection:
            assert connection.recv(1000).startswith(b"HTTP/1.1 413")


def test_a_server_that_stops_finishes_what_it_took(loaded: LoadedModels) -> None:
    server = Server(make_served(loaded, options()))
    found = list[Any]()
    thread = threading.Thread(target=lambda: found.append(server.chat(max_tokens=100)))
    thread.start()
    wait_until(lambda: server.engine.num_running)
    server.close()
    thread.join()
    assert found[0].choices[0].finish_reason == "stop"
    with pytest.raises(openai.APIConnectionError):
        server.chat()
    assert not server.engine._thread.is_alive()


def test_a_server_for_the_network_needs_a_token() -> None:
    with pytest.raises(ValueError, match="MMSPEC_TOKEN"):
        check_access(options(host="0.0.0.0", token=None))
    check_access(options(host="localhost", token=None))
    check_access(options(host="::1", token=None))
