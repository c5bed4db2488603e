"""A local small model with its target behind a real server, which may be down, slow or invalid."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec.edge import messages
from mmspec.edge.device import connect, link_of
from mmspec.edge.service import Service, create_app
from tests import toys
from tests.modalities.speech import recognisers
from tests.modalities.speech.recognition.test_plug import moonshine
from tests.partners import noisy
from tests.toys import granite

pytest.importorskip("fastapi")
uvicorn: Any = pytest.importorskip("uvicorn")

IDS = {"input_ids": torch.tensor([[5, 6, 7]])}
TOKEN, ROOM = "a token that is long enough", 14


@contextmanager
def served(model: Any, **limits: Any) -> Iterator[tuple[str, Service]]:
    """A model behind uvicorn, on a free port of this machine."""
    service = Service(model, max_requests=limits.pop("max_requests", 8))
    config = uvicorn.Config(create_app(service, TOKEN, **limits), port=0, log_level="error")
    server = uvicorn.Server(config)
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


def test_a_service_that_is_down(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    decode_alone(f"http://127.0.0.1:{port}", caplog, "refused")


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
    "empty": (b'{"best": [[[], [1], [1], [1], [1]]]}', "without ids"),
    "twice": (b'{"best": [[[1, 1], [1], [1], [1], [1]]]}', "repeated id"),
    "huge": (b" " * (1 << 20) + b"{}", "more than 1048576 bytes"),
    "deep": (b"[" * 100_000, "no JSON"),
}


@pytest.mark.parametrize("case", INVALID)
def test_a_service_with_invalid_responses(case: str, caplog: pytest.LogCaptureFixture) -> None:
    body, says = INVALID[case]

    def respond(path: str) -> tuple[int, bytes]:
        if path.startswith(messages.CHECK):
            return 200, body
        return 200, HELLO if path == messages.HELLO else b'{"request": "x"}'

    with fake_service(respond) as url:
        decode_alone(url, caplog, says)


def test_a_service_that_is_slow_or_breaks_off(caplog: pytest.LogCaptureFixture) -> None:
    is_over = threading.Event()

    def slow(path: str) -> tuple[int, bytes]:
        if path.startswith(messages.CHECK):
            is_over.wait(30)
        return 200, HELLO if path == messages.HELLO else b'{"request": "x"}'

    with fake_service(slow) as url:
        decode_alone(url, caplog, "timed out", timeout_s=2.0)
        is_over.set()
    with fake_service(lambda path: (500, b"oh")) as url:
        decode_alone(url, caplog, "500 oh")


def test_a_service_that_dies_in_the_middle_loses_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Checked tokens stay, and the device resumes after them; the next request uses it again."""
    request = toys.inputs("llama")
    greedy = toys.model("llama").generate(**request, max_new_tokens=ROOM, do_sample=False)
    with served(toys.model("llama")) as (url, service):
        fast = connect(small(), url, TOKEN, tau_h=-1.0, ranks=1)
        tokens: list[int] = []
        for round_ in fast.stream(**request, max_new_tokens=ROOM):
            tokens += round_.tokens[0]
            if round_.index == 0:
                checked = len(tokens)
                service.requests.clear()  # as after a restart
        start = request["input_ids"].shape[1]
        assert tokens[:checked] == greedy[0, start : start + checked].tolist()
        assert len(tokens) == ROOM
        assert "404 no such request" in caplog.text
        rest = torch.tensor([request["input_ids"][0].tolist() + tokens[:checked]])
        alone_ = small().generate(rest, max_new_tokens=ROOM - checked, do_sample=False)
        assert tokens[checked:] == alone_[0, rest.shape[1] :].tolist()
        assert torch.equal(fast.generate(**request, max_new_tokens=ROOM).sequences, greedy)


def test_tensors_of_one_request_may_share_their_memory() -> None:
    ids = torch.tensor([[5, 6, 7]])
    packed = messages.unpack(messages.pack({"input_ids": ids, "position_ids": ids}))
    assert torch.equal(packed["position_ids"], ids)


def post(url: str, body: bytes, token: str = TOKEN) -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(url, data=body, headers=headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_strangers_and_bad_messages_are_turned_away(service: str) -> None:
    packed = messages.pack(toys.inputs("llama"))
    for path in (messages.HELLO, f"{messages.BEGIN}?room=4", messages.CHECK):
        assert post(service + path, b"", "another token that is long") == (401, b"")
    begin = f"{service}{messages.BEGIN}"
    for address, body, says in (
        (begin, packed, b"room is not a number"),
        (f"{begin}?room=-1", packed, b"room is not a number"),
        (f"{begin}?room={10**30}", packed, b"room is not a number"),
        (f"{begin}?room=4", b"nothing", b"no tensors"),
        (f"{begin}?room=4", messages.pack({"x": torch.ones(1)}), b"needs input_ids"),
        (f"{begin}?room=4", messages.pack({"input_ids": torch.full((1, 3), 10**6)}), b"1000000"),
        (f"{begin}?room=4", messages.pack({"input_ids": torch.tensor(3)}), b"(rows, tokens)"),
        (f"{begin}?room=4", messages.pack({"input_ids": torch.ones(1, 0).long()}), b"(rows, tok"),
        (f"{begin}?room=4", messages.pack({**IDS, "pixel_values": torch.ones(1)}), b"a text model"),
        (service + messages.CHECK, b"{}", b"request is not an id"),
    ):
        status, content = post(address, body)
        assert (status, says in content) == (422, True), content
    hidden = messages.pack({**IDS, "attention_mask": torch.tensor([[1, 1, 0]])})
    name = json.loads(post(f"{begin}?room=4", hidden)[1])["request"]
    good = {"request": name, "ranks": 2, "tokens": [[]], "draft": [[5, 6]], "accepted": [0]}
    for wrong, says in (
        ({}, b"pad on the left"),  # its prompt is read with the first draft
        ({"ranks": 0}, b"ranks is not a number"),
        ({"draft": [[5] * 65]}, b"longer than 64"),
        ({"draft": [["a"]]}, b"has an id outside"),
        ({"tokens": [[1] * 5]}, b"longer than 4"),
        ({"accepted": [1]}, b"is not a common prefix"),
        ({"draft": [[1], [2]]}, b"no 1 rows"),
    ):
        body = json.dumps({**good, **wrong, "request": name}).encode()
        status, content = post(service + messages.CHECK, body)
        assert (status, says in content) == (422, True), content
        assert post(service + messages.CHECK, body)[0] == 404  # dropped
        name = json.loads(post(f"{begin}?room=4", packed)[1])["request"]
    status, content = post(service + messages.CHECK, json.dumps({**good, "request": name}).encode())
    assert status == 200
    assert [len(place) for place in json.loads(content)["best"][0]] == [2, 2, 2]


def test_what_is_too_large_is_not_read_and_old_requests_are_dropped() -> None:
    with served(toys.model("llama"), max_bytes=2000, max_requests=1) as (url, service):
        begin = f"{url}{messages.BEGIN}?room=4"
        assert post(begin, b"x" * 5000)[0] == 413
        packed = messages.pack(toys.inputs("llama"))
        first = json.loads(post(begin, packed)[1])["request"]
        assert post(begin, packed)[0] == 200
        assert len(service.requests) == 1
        assert post(url + messages.CHECK, json.dumps({"request": first}).encode())[0] == 404


def test_the_least_recently_used_request_is_dropped() -> None:
    service = Service(toys.model("llama"), max_requests=2)
    first, second = (service.begin(IDS, 4) for _ in range(2))
    message = {"ranks": 1, "tokens": [[]], "draft": [[5]], "accepted": [0]}
    service.check({**message, "request": first})
    third = service.begin(IDS, 4)
    assert list(service.requests) == [first, third]
    with pytest.raises(KeyError):
        service.check({**message, "request": second})


def test_what_cannot_work_is_refused(service: str) -> None:
    for make, says in (
        (lambda: create_app(Service(toys.model("llama")), "short"), "a token of 5 characters"),
        (lambda: connect(small(), "nowhere", TOKEN), "url='nowhere' is not an http"),
        (lambda: connect(small(), service, TOKEN, timeout_s=0), "timeout_s=0"),
        (lambda: connect(small(), service, TOKEN, ranks=65), "ranks=65.*64 at most"),
        (lambda: connect(small(), service, TOKEN, length=65), "length=65.*64 at most"),
        (lambda: connect(granite.model(), service, TOKEN), f"has {SIZE} tokens and this model"),
    ):
        with pytest.raises(ValueError, match=says):
            make()
    with pytest.raises(ValueError, match="decodes greedily"):
        connect(small(), service, TOKEN).generate(
            **toys.inputs("llama"), max_new_tokens=4, temperature=0.7
        )
