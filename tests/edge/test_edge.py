"""A local small model with its target behind a real server, which may be down, slow or invalid."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

import mmspec
from mmspec.edge import messages
from mmspec.edge.device import connect, link_of
from mmspec.edge.service import Service, create_app, serve
from mmspec.serving.limits import create_server
from tests import toys
from tests.covering import exhaustive, limited
from tests.modalities.speech import recognisers
from tests.modalities.speech.recognition.test_plug import moonshine
from tests.partners import noisy
from tests.toys import granite

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

IDS = {"input_ids": torch.tensor([[5, 6, 7]])}
TOKEN, ROOM = "a-token-that-is-long-enough", 14


@contextmanager
def served(model: Any, **limits: Any) -> Iterator[tuple[str, Service]]:
    """A model behind uvicorn, on a free port of this machine."""
    service = Service(model, max_requests=limits.pop("max_requests", 8))
    server = create_server(create_app(service, TOKEN, **limits), "127.0.0.1", 0)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", service
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    with served(toys.model("llama")) as (url, _):
        yield url


def small() -> Any:
    return noisy("llama", scale=0.1)


def alone(request: dict[str, Tensor]) -> Tensor:
    found: Tensor = small().generate(**request, max_new_tokens=ROOM, do_sample=False)
    return found


@pytest.mark.parametrize("batch", [{}, {"batch": 3, "ragged": True}], ids=["one", "ragged"])
def test_one_rank_without_a_gate_is_the_service_s_greedy_decoding(
    service: str, batch: dict[str, Any]
) -> None:
    request = toys.inputs("llama", **batch)
    wanted = toys.model("llama").generate(**request, max_new_tokens=ROOM, do_sample=False)
    fast = connect(small(), service, TOKEN, tau_h=-1.0, ranks=1)
    out = fast.generate(**request, max_new_tokens=ROOM)
    assert torch.equal(out.sequences, wanted)
    assert out.stats.num_accepted_draft_tokens > 0
    assert torch.equal(fast.generate(**request, max_new_tokens=ROOM).sequences, wanted)


@pytest.mark.parametrize("tau_h", [-1.0, 3.4, 3.7, 4.0, 4.2])
def test_what_comes_over_the_wire_is_what_comes_in_process(service: str, tau_h: float) -> None:
    request = toys.inputs("llama", batch=2)
    here = mmspec.accelerate(toys.model("llama"), "ugsd", drafter=small(), tau_h=tau_h)
    there = connect(small(), service, TOKEN, tau_h=tau_h)
    wanted = here.generate(**request, max_new_tokens=ROOM)
    found = there.generate(**request, max_new_tokens=ROOM)
    assert torch.equal(found.sequences, wanted.sequences)
    assert found.stats.target_calls == wanted.stats.target_calls


def test_the_more_is_kept_the_less_is_sent(service: str) -> None:
    sent = []
    for tau_h in (-1.0, 3.4, 4.0, float("inf")):
        fast = connect(small(), service, TOKEN, tau_h=tau_h)
        before = link_of(fast).sent_bytes
        out = fast.generate(**toys.inputs("llama"), max_new_tokens=ROOM)
        sent.append(link_of(fast).sent_bytes - before)
    assert sent == sorted(sent, reverse=True)
    assert sent[0] > sent[-1] == 0
    assert torch.equal(out.sequences, alone(toys.inputs("llama")))


def test_sounds_go_along(service: str) -> None:
    request, model = granite.inputs((3,), seed=1), granite.model()
    with served(model) as (url, _):
        fast = connect(model, url, TOKEN, tau_h=-1.0, ranks=1)
        out = fast.generate(**request, max_new_tokens=8)
    wanted = model.generate(**request, max_new_tokens=8, do_sample=False)
    assert torch.equal(out.sequences, wanted)


def test_the_source_of_an_encoder_decoder_and_its_mask_go_along() -> None:
    model, mask = moonshine(), torch.ones(2, 8000, dtype=torch.int64)
    mask[1, 3000:] = 0
    sounds = torch.randn(2, 8000, generator=torch.Generator().manual_seed(0)) * mask
    request = {"input_values": sounds, "attention_mask": mask}
    wanted = model.generate(**request, max_new_tokens=8, do_sample=False)
    with served(model) as (url, _):
        fast = connect(moonshine(1), url, TOKEN, tau_h=-1.0, ranks=1)
        assert torch.equal(fast.generate(**request, max_new_tokens=8).sequences, wanted)
        assert fast.last_stats is not None
        assert fast.last_stats.unverified_tokens == 0


def test_a_whisper_sends_features_and_not_encoder_outputs() -> None:
    target, drafter = recognisers.whisper(), recognisers.whisper(1, 1)
    for one in (target, drafter):
        one.generation_config.suppress_tokens = one.generation_config.begin_suppress_tokens = None
    audio = [recognisers.noise(1.0).numpy(), recognisers.noise(1.5, 2).numpy()]
    rate = recognisers.RATE_HZ
    request = recognisers.processor()(audio, sampling_rate=rate, return_tensors="pt")
    options: dict[str, Any] = {**request, "language": "en", "max_new_tokens": 8}
    with served(target) as (url, _):
        fast = connect(drafter, url, TOKEN, tau_h=-1.0, ranks=1)
        assert torch.equal(fast.generate(**options).sequences, target.generate(**options))
        assert fast.last_stats is not None
        assert fast.last_stats.unverified_tokens == 0
        made = drafter.get_encoder()(request["input_features"])
        with pytest.raises(ValueError, match="the service runs its own encoder"):
            fast.generate(encoder_outputs=made, language="en", max_new_tokens=8)


# Failures


def decode_alone(url: str, caplog: pytest.LogCaptureFixture, says: str, **more: Any) -> None:
    """A request through a bad service: the device's own text, and one warning."""
    request = toys.inputs("llama")
    fast = connect(small(), url, TOKEN, tau_h=-1.0, **more)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "mmspec"):
        out = fast.generate(**request, max_new_tokens=ROOM)
    assert torch.equal(out.sequences, alone(request))
    warnings = [one.message for one in caplog.records if "cannot be used" in one.message]
    assert len(warnings) == 1
    assert says in warnings[0]
    assert out.stats.num_new_tokens == out.stats.unverified_tokens == ROOM


DOWN = "http://127.0.0.1:1"


def test_a_service_that_is_down(caplog: pytest.LogCaptureFixture) -> None:
    decode_alone(DOWN, caplog, "refused")


@contextmanager
def fake_service(answer: Callable[[str], tuple[int, bytes]]) -> Iterator[str]:
    """A server that is none of ours."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            status, body = answer(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


SIZE = int(toys.model("llama").config.vocab_size)
HELLO = json.dumps({"vocabulary": SIZE}).encode()
INVALID: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"<html>", "no JSON"),
    "a list": (b"[]", "a JSON list"),
    "no rows": (b'{"best": 5}', "other rows"),
    "few places": (b'{"best": [[[1]]]}', "no 5 rows"),
    "no ids": (b'{"best": [[[-1], [1], [1], [1], [1]]]}', "has an id outside"),
    "no id": (b'{ "best": [[[1]]]}', "without the id"),
    "empty": (b'{"best": [[[], [1], [1], [1], [1]]]}', "without ids"),
    "twice": (b'{"best": [[[1, 1], [1], [1], [1], [1]]]}', "repeated id"),
    "huge": (b" " * (1 << 20) + b"{}", "more than 1048576 bytes"),
    "deep": (b"[" * 100_000, "no JSON"),
}


@pytest.mark.parametrize("case", exhaustive(INVALID, ("no JSON", "no ids", "deep")))
def test_a_service_with_invalid_responses(case: str, caplog: pytest.LogCaptureFixture) -> None:
    body, says = INVALID[case]

    def respond(path: str) -> tuple[int, bytes]:
        if path == messages.HELLO:
            return 200, HELLO
        return 200, body.replace(b'{"best', b'{"request": "x", "best')

    with fake_service(respond) as url:
        decode_alone(url, caplog, says)


@pytest.mark.exhaustive
def test_a_service_that_is_slow_or_breaks_off(caplog: pytest.LogCaptureFixture) -> None:
    is_over = threading.Event()

    def slow(path: str) -> tuple[int, bytes]:
        if path != messages.HELLO:
            is_over.wait(30)
        return 200, HELLO

    with fake_service(slow) as url:
        decode_alone(url, caplog, "timed out", timeout_s=2.0)
        is_over.set()
    with fake_service(lambda path: (500, b"oh")) as url:
        decode_alone(url, caplog, "500 oh")


LENGTHS: tuple[dict[str, Any], ...] = (
    {"length": 1},
    {"length": 4},
    {"length": "confidence"},
    {"length": "entropy"},
)


@pytest.mark.parametrize("length", LENGTHS, ids=str)
@pytest.mark.parametrize("batch", [{}, {"batch": 3, "ragged": True}], ids=["one", "ragged"])
def test_every_draft_length_finishes_alone(length: dict[str, Any], batch: dict[str, Any]) -> None:
    request = toys.inputs("llama", **batch)
    out = connect(small(), DOWN, TOKEN, **length).generate(**request, max_new_tokens=ROOM)
    assert torch.equal(out.sequences, alone(request))
    assert out.stats.target_calls == 0


@pytest.mark.parametrize("length", limited(LENGTHS, 2), ids=str)
def test_a_service_that_goes_down_in_the_middle_loses_nothing(length: dict[str, Any]) -> None:
    """Checked tokens stay, and the device resumes after them."""
    request = toys.inputs("llama")
    greedy = toys.model("llama").generate(**request, max_new_tokens=ROOM, do_sample=False)
    with served(toys.model("llama")) as (url, _):
        fast = connect(small(), url, TOKEN, tau_h=-1.0, ranks=1, **length)
        tokens: list[int] = []
        for round_ in fast.stream(**request, max_new_tokens=ROOM):
            tokens += round_.tokens[0]
            if round_.index == 0:
                checked = len(tokens)
                link_of(fast).url = DOWN
    start = request["input_ids"].shape[1]
    assert tokens[:checked] == greedy[0, start : start + checked].tolist()
    rest = torch.tensor([request["input_ids"][0].tolist() + tokens[:checked]])
    alone_ = small().generate(rest, max_new_tokens=ROOM - checked, do_sample=False)
    assert tokens[checked:] == alone_[0, rest.shape[1] :].tolist()


def test_a_service_that_restarts_gets_the_request_again(caplog: pytest.LogCaptureFixture) -> None:
    request = toys.inputs("llama", batch=2, ragged=True)
    greedy = toys.model("llama").generate(**request, max_new_tokens=ROOM, do_sample=False)
    with served(toys.model("llama")) as (url, service):
        fast = connect(small(), url, TOKEN, tau_h=-1.0, ranks=1)
        tokens: list[list[int]] = [[], []]
        for round_ in fast.stream(**request, max_new_tokens=ROOM):
            for row, new in zip(tokens, round_.tokens, strict=True):
                row += new
            service.requests.clear()
    assert tokens == greedy[:, request["input_ids"].shape[1] :].tolist()
    assert not caplog.records


def test_more_devices_than_places_change_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    """The rounds of five requests take turns at a service that keeps two of them."""
    requests = [toys.inputs("llama", seed=seed) for seed in range(5)]
    with served(toys.model("llama"), max_requests=2) as (url, service):
        tokens: list[list[int]] = [[] for _ in requests]
        streams = {
            index: connect(small(), url, TOKEN, tau_h=-1.0, ranks=1).stream(
                **request, max_new_tokens=ROOM
            )
            for index, request in enumerate(requests)
        }
        while streams:
            for index, stream in list(streams.items()):
                round_ = next(stream, None)
                if round_ is None:
                    del streams[index]
                else:
                    tokens[index] += round_.tokens[0]
        assert len(service.requests) == 2
    for request, found in zip(requests, tokens, strict=True):
        wanted = toys.model("llama").generate(**request, max_new_tokens=ROOM, do_sample=False)
        assert found == wanted[0, request["input_ids"].shape[1] :].tolist()
    assert not caplog.records


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST /begin?room=4 HTTP/1.1\r\nHost: h\r\n", b"stalled body"],
    ids=["nothing", "headers", "body"],
)
def test_a_stalled_connection_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    if sent == b"stalled body":
        sent = f"POST /check HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
        sent += b"Content-Length: 1000\r\nHost: h\r\n\r\n{"
    monkeypatch.setattr("mmspec.serving.limits.MAX_READ_S", 0.2)
    with served(toys.model("llama")) as (url, _):
        address = urllib.parse.urlsplit(url)
        with socket.create_connection((address.hostname, address.port), timeout=10) as stalled:
            stalled.sendall(sent)
            with suppress(ConnectionResetError):
                assert stalled.recv(1000) == b""


FIRST = {"known": [0], "accepted": [0], "tokens": [[]], "draft": [[5]], "ranks": 1}


def test_tensors_of_one_request_may_share_their_memory() -> None:
    ids = torch.tensor([[5, 6, 7]])
    packed, first = messages.unpack(
        messages.pack({"input_ids": ids, "position_ids": ids}, {"ranks": 2})
    )
    assert torch.equal(packed["position_ids"], ids)
    assert first == {"ranks": 2}


def post(url: str, body: bytes, token: str = TOKEN) -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(url, data=body, headers=headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def pack(tensors: dict[str, Tensor], **first: Any) -> bytes:
    return messages.pack(tensors, {**FIRST, **first})


def test_strangers_and_bad_messages_are_turned_away(service: str) -> None:
    packed = pack(toys.inputs("llama"))
    for path in (messages.HELLO, f"{messages.BEGIN}?room=4", messages.CHECK):
        assert post(service + path, b"", "another token that is long") == (401, b"")
    begin = f"{service}{messages.BEGIN}"
    for address, body, says in (
        (begin, packed, b"room is not a number"),
        (f"{begin}?room=-1", packed, b"room is not a number"),
        (f"{begin}?room={10**30}", packed, b"room is not a number"),
        (f"{begin}?room=4", b"nothing", b"no tensors"),
        (f"{begin}?room=4", save(IDS), b"no first check"),
        (f"{begin}?room=4", save(IDS, {messages.CHECK: "[]"}), b"a JSON list"),
        (f"{begin}?room=4", pack({"x": torch.ones(1)}), b"needs input_ids"),
        (f"{begin}?room=4", pack({"input_ids": torch.full((1, 3), 10**6)}), b"1000000"),
        (f"{begin}?room=4", pack({"input_ids": torch.tensor(3)}), b"(rows, tokens)"),
        (f"{begin}?room=4", pack({"input_ids": torch.ones(1, 0).long()}), b"(rows, tok"),
        (f"{begin}?room=4", pack({"input_ids": torch.ones(65, 2).long()}), b"64 rows"),
        (f"{begin}?room=4", pack({"input_ids": torch.ones(8, 4093).long()}), b"8 rows of 4093"),
        (f"{begin}?room=4", pack({**IDS, "pixel_values": torch.ones(1)}), b"a text model"),
        (f"{begin}?room=4", pack({**IDS, "attention_mask": RIGHT}), b"pad on the left"),
        (service + messages.CHECK, b"{}", b"request is not an id"),
    ):
        status, content = post(address, body)
        assert (status, says in content) == (422, True), content
    good = FIRST | {"draft": [[5, 6]]}
    for wrong, says in (
        ({"ranks": 0}, b"ranks is not a number"),
        ({"draft": [[5] * 65]}, b"longer than 64"),
        ({"draft": [["a"]]}, b"has an id outside"),
        ({"tokens": [[1] * 5]}, b"longer than 4"),
        ({"accepted": [2]}, b"is not a common prefix"),
        ({"draft": [[1], [2]]}, b"no 1 rows"),
    ):
        assert post(f"{begin}?room=4", pack(toys.inputs("llama"), **wrong))[0] == 422
        name = json.loads(post(f"{begin}?room=4", packed)[1])["request"]
        body = json.dumps({**good, **wrong, "request": name}).encode()
        status, content = post(service + messages.CHECK, body)
        assert (status, says in content) == (422, True), content
        assert post(service + messages.CHECK, body)[0] == 404  # dropped
    name = json.loads(post(f"{begin}?room=4", packed)[1])["request"]
    status, content = post(service + messages.CHECK, json.dumps({**good, "request": name}).encode())
    assert status == 200
    assert [len(place) for place in json.loads(content)["best"][0]] == [1, 1, 1]


RIGHT = torch.tensor([[1, 1, 0]])  # a mask padded on the right


def test_a_message_that_comes_twice_is_not_read_twice(service: str) -> None:
    packed = pack(toys.inputs("llama"))
    begun = json.loads(post(f"{service}{messages.BEGIN}?room=4", packed)[1])
    message = FIRST | {"request": begun["request"], "tokens": [begun["best"][0][0]]}
    assert post(service + messages.CHECK, json.dumps(message).encode())[0] == 200
    assert post(service + messages.CHECK, json.dumps(message).encode())[0] == 404


def test_what_is_too_large_is_not_read_and_old_requests_are_dropped() -> None:
    with served(toys.model("llama"), max_bytes=2000, max_requests=1) as (url, service):
        begin = f"{url}{messages.BEGIN}?room=4"
        assert post(begin, b"x" * 5000)[0] == 413
        packed = pack(toys.inputs("llama"))
        first = json.loads(post(begin, packed)[1])["request"]
        assert post(begin, packed)[0] == 200
        assert len(service.requests) == 1
        assert post(url + messages.CHECK, json.dumps({"request": first}).encode())[0] == 404


def test_the_least_recently_used_request_is_dropped() -> None:
    service = Service(toys.model("llama"), max_requests=2)
    first, second = (service.begin(IDS, 4, FIRST)[0] for _ in range(2))
    service.check({**FIRST, "request": first})
    third, _ = service.begin(IDS, 4, FIRST)
    assert list(service.requests) == [first, third]
    with pytest.raises(KeyError):
        service.check({**FIRST, "request": second})


def test_what_cannot_work_is_refused(service: str) -> None:
    wrong: Any = 5
    for make, says in (
        (lambda: create_app(Service(toys.model("llama")), "short"), "a token of 5 characters"),
        (lambda: connect(small(), service, ""), "a token of 0 characters"),
        (lambda: connect(small(), service, TOKEN + "\n"), "without spaces"),
        (lambda: connect(small(), service, wrong), "a token 5 is not 16 or more"),
        (
            lambda: connect(small(), service, TOKEN, timeout_s=wrong * 10**9),
            "timeout_s=5000000000 must be a number",
        ),
        (lambda: Service(toys.model("llama"), 0), "most=0"),
        (lambda: serve(toys.model("llama"), TOKEN, port=70000), "port=70000"),
        (lambda: connect(small(), service, TOKEN, timeout_s=0), "timeout_s=0"),
        (lambda: connect(small(), service, TOKEN, ranks=65), "ranks=65.*64 at most"),
        (lambda: connect(small(), service, TOKEN, length=65), "length=65.*64 at most"),
        (lambda: connect(granite.model(), service, TOKEN), f"has {SIZE} tokens and this model"),
    ):
        with pytest.raises(ValueError, match=says):
            make()
    for url in (
        "nowhere",
        "",
        "http://",
        wrong,
        "http://h:70000",
        "http://h/?a",
        "http://a@h",
        "ftp://h",
    ):
        with pytest.raises(ValueError, match="is not an http"):
            connect(small(), url, TOKEN)
    with pytest.raises(ValueError, match="1 rows of 3 tokens and max_new_tokens=40000 are more"):
        connect(small(), service, TOKEN).generate(**IDS, max_new_tokens=40000)
    with pytest.raises(ValueError, match="decodes greedily"):
        connect(small(), service, TOKEN).generate(
            **toys.inputs("llama"), max_new_tokens=4, temperature=0.7
        )
