"""A long mixed load with faults: nothing is lost, nothing comes twice, and memory stays flat.

MMSPEC_LOAD=1000 pytest -m slow tests/serving/test_mixed_load.py      so many requests, at once
MMSPEC_LOAD_S=3600 pytest -m slow -s tests/serving/test_mixed_load.py one hour, MMSPEC_LOAD_RATE
                                                                      requests a second (1)

The load comes in parts. Memory is measured after each of them, when no request runs: what is in use
then was kept of requests that have ended.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from mmspec.cli.models import load_models
from mmspec.cli.serve import make_served
from mmspec.serving.limits import limit_arenas
from mmspec.serving.ticket import DeadlineExceeded
from mmspec.targets.tokens.causal import CausalTarget
from tests.serving.test_server import MODEL, Server, openai, options, question, wait_until

COUNT = int(os.environ.get("MMSPEC_LOAD", "60"))
SECONDS = float(os.environ.get("MMSPEC_LOAD_S", "0"))  # in place of a count
RATE = float(os.environ.get("MMSPEC_LOAD_RATE", "1"))
CLIENTS = 8
FLOOD = 24  # requests at once: more than run and wait
PARTS = 12 if SECONDS else 4
MAX_GROWTH = 32 << 20  # bytes of the process, after a third of the load
MAX_USED_GROWTH = 1 << 10  # bytes in use, per request of the rest
MAX_OBJECT_GROWTH = 0.5  # the same in blocks of Python objects
FREE_GROWTH = 1000  # times both: requests that may fill caches
MIN_LOAD = 100  # requests, among which some find no memory, and until which caches fill
MAX_STARVED = 0.5  # of a request's time, waited for a processor: its limit may be exceeded
GOOD = ("ask", "stream", "sampled", "text")
# of one request in three
FAULTS = ("abandon", "garbage", "stall", "hang", "unknown", "closed", "deaf", "late")
PROMPTS = ("describe the picture", "what is in the center?", "how many things are there?")
SEEDS = (1, 2, 3)
HANG_S = 2  # until the server ends a connection whose body does not come
MEMORY_FAULT = 97  # forwards of several rows, of which one finds no memory


class Load:
    """Requests of several clients, with the text that each of them gets alone."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.expected = {one: self.ask(one) for one in PROMPTS}
        self.sampled = {
            (one, seed): self.ask(one, temperature=1, seed=seed)
            for one in PROMPTS
            for seed in SEEDS
        }
        self.texts = {one: self.ask(one, is_text=True) for one in PROMPTS}
        self.num_first = len(self.expected) + len(self.sampled) + len(self.texts)
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.lock = threading.Lock()
        threads = (server.engine._thread.native_id, server.thread.native_id)
        self.wait = ProcessorWait(*(one for one in threads if one is not None))

    def ask(self, prompt: str, is_text: bool = False, **more: Any) -> str:
        messages = [{"role": "user", "content": prompt}] if is_text else question(prompt)
        reply = self.server.chat(messages, **more)
        return str(reply.choices[0].message.content)

    def run(self, seed: int) -> None:
        choose = random.Random(seed)
        prompt = choose.choice(PROMPTS)
        kind = choose.choice(FAULTS) if choose.random() < 1 / 3 else choose.choice(GOOD)
        if SECONDS and choose.random() < 1 / 100:
            kind = "flood"
        begun = self.wait.read()
        try:
            wrong = getattr(self, f"_{kind}")(prompt, choose)
        except openai.RateLimitError as error:
            kind, wrong = "refused", self._check_refusal(error)
        except (openai.APIError, TimeoutError) as error:
            kind, wrong = self._check_late(kind, error, begun)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        with self.lock:
            self.outcomes[kind] += 1
            if wrong is not None:
                self.wrong.append(f"{kind} {prompt!r}: {wrong!r}")

    def _ask(self, prompt: str, _: Any) -> str | None:
        return differing(self.ask(prompt), self.expected[prompt])

    def _sampled(self, prompt: str, choose: random.Random) -> str | None:
        seed = choose.choice(SEEDS)
        text = self.ask(prompt, temperature=1, seed=seed)
        return differing(text, self.sampled[prompt, seed])

    def _text(self, prompt: str, _: Any) -> str | None:
        return differing(self.ask(prompt, is_text=True), self.texts[prompt])

    def _stream(self, prompt: str, _: Any) -> str | None:
        chunks = self.server.chat(question(prompt), stream=True)
        text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
        return differing(text, self.expected[prompt])

    def _flood(self, prompt: str, choose: random.Random) -> str | None:
        """More requests at once than run and wait: some are refused, all others are right."""
        before = self.server.engine.counters.refused
        found: list[str | None] = []

        def ask() -> None:
            try:
                found.append(self._ask(prompt, choose))
            except openai.RateLimitError as error:
                found.append(self._check_refusal(error))

        threads = [threading.Thread(target=ask) for _ in range(FLOOD)]
        run_threads(threads)
        wrong = [one for one in found if one is not None]
        if len(found) != FLOOD:
            wrong.append(f"{FLOOD - len(found)} have no reply")
        if self.server.engine.counters.refused == before:
            wrong.append("none was refused")
        return wrong[0] if wrong else None

    def _check_refusal(self, error: Any) -> str | None:
        after = error.response.headers.get("retry-after", "")
        return None if after.isdigit() and int(after) >= 1 else f"retry-after={after!r}"

    def _check_late(self, kind: str, error: Any, begun: Any) -> tuple[str, str | None]:
        """A limit of time may be exceeded where the server was given no processor."""
        share = self.wait.share(begun)
        is_late = isinstance(error, TimeoutError) or "in time" in str(error)
        if is_late and share >= MAX_STARVED:
            return "starved", None
        return kind, f"{error}; the server waited {share:.0%} of the time for a processor"

    def _abandon(self, prompt: str, _: Any) -> None:
        stream = self.server.chat(question(prompt), stream=True)
        next(iter(stream))
        stream.close()

    def _garbage(self, prompt: str, _: Any) -> None:
        with self.server.send(b"{" + prompt.encode()) as connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 400")

    def _stall(self, prompt: str, _: Any) -> None:
        with self.server.send(b"{", 1000):
            pass

    def _hang(self, prompt: str, _: Any) -> str | None:
        """A body that does not come: the server ends the connection."""
        with self.server.send(b"{", 1000) as connection, suppress(ConnectionResetError):
            return differing(connection.recv(100).decode(), "")
        return None

    def _unknown(self, prompt: str, _: Any) -> None:
        with pytest.raises(openai.BadRequestError):
            self.ask(prompt, presence_penalty=1)

    def _closed(self, prompt: str, _: Any) -> None:
        self.server.send(self._body(prompt)).close()

    def _deaf(self, prompt: str, _: Any) -> None:
        """A client that takes nothing of its stream, for a while."""
        with self.server.send(self._body(prompt, stream=True)):
            time.sleep(0.5)

    def _late(self, prompt: str, _: Any) -> str | None:
        service = self.server.routes.service
        inputs = service.chat.make_inputs(turns_of(prompt))
        request = {**inputs, "max_new_tokens": 200, "min_new_tokens": 200, "do_sample": False}
        try:
            self.server.engine.submit(request, timeout_s=0.05).result(60)
        except DeadlineExceeded:
            return None
        except ValueError:  # the queue is full
            return None
        return "it ended in time"

    def _body(self, prompt: str, **more: Any) -> bytes:
        body = {"model": MODEL, "messages": question(prompt), "temperature": 0, **more}
        return json.dumps(body).encode()


def differing(text: str, expected: str) -> str | None:
    return None if text == expected else text


def turns_of(prompt: str) -> Any:
    from mmspec.serving.chat import ChatRequest

    body = {"model": MODEL, "messages": question(prompt)}
    return ChatRequest.parse(body, 64).turns


def run_threads(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class ProcessorWait:
    """The seconds that threads were ready and had no processor, from the scheduler of Linux."""

    def __init__(self, *threads: int) -> None:
        self.files = [Path(f"/proc/self/task/{one}/schedstat") for one in threads]

    def read(self) -> tuple[float, float]:
        """The time, and the seconds waited so far, summed."""
        waited = sum(int(one.read_text().split()[1]) for one in self.files if one.is_file())
        return time.monotonic(), waited / 1e9

    def share(self, begun: tuple[float, float]) -> float:
        """The share of the time since `begun` that they waited."""
        now = self.read()
        return (now[1] - begun[1]) / max(now[0] - begun[0], 1e-9)


class AllocatorState(ctypes.Structure):
    """`struct mallinfo2` of glibc, summed over its arenas."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks")
    _fields_ = [(name, ctypes.c_size_t) for name in (*_names, "fordblks", "keepcost")]


@dataclass(frozen=True)
class Memory:
    """What a process holds while it is idle."""

    used: int  # bytes in use of the C allocator, which holds tensors
    objects: int  # blocks in use of the allocator of Python
    resident: int  # bytes of the process, without those that its allocator can give back

    @classmethod
    def measure(cls) -> Memory:
        gc.collect()
        used = 0
        with suppress(OSError, AttributeError):
            libc = ctypes.CDLL("libc.so.6")
            libc.malloc_trim(0)
            libc.mallinfo2.restype = AllocatorState
            state = libc.mallinfo2()
            used = state.uordblks + state.hblkhd
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(used, sys.getallocatedblocks(), pages * os.sysconf("SC_PAGESIZE"))

    def find_growth(self, before: Memory, requests: int) -> str | None:
        """What grew more than so many requests may let it, since `before`."""
        found = {
            "bytes in use": (self.used - before.used, MAX_USED_GROWTH * (FREE_GROWTH + requests)),
            "objects": (
                self.objects - before.objects,
                MAX_OBJECT_GROWTH * (FREE_GROWTH + requests),
            ),
            "bytes of the process": (self.resident - before.resident, MAX_GROWTH),
        }
        grown = [f"{name} grew by {by}" for name, (by, limit) in found.items() if by > limit]
        return "; ".join(grown) or None

    def __str__(self) -> str:
        return (
            f"{self.used / 2**20:.1f} of {self.resident >> 20} MiB in use, {self.objects} objects"
        )


def arrivals() -> list[float]:
    """Seconds from the start at which requests are sent: all at once, or a Poisson process."""
    if not SECONDS:
        return [0.0] * COUNT
    choose, times, at = random.Random(0), list[float](), 0.0
    while (at := at + choose.expovariate(RATE)) < SECONDS:
        times.append(at)
    return times


def split_load(times: list[float]) -> list[list[tuple[int, float]]]:
    """Parts of a load: the numbers of their requests, and seconds from the start of the part."""
    numbered = list(enumerate(times))
    bounds = [len(times) * part // PARTS for part in range(PARTS + 1)]
    parts = [numbered[low:high] for low, high in pairwise(bounds)]
    return [[(seed, at - part[0][1]) for seed, at in part] for part in parts]


def run_part(load: Load, part: list[tuple[int, float]]) -> Memory:
    """Send requests; returns the memory of the process once they have ended."""
    left, lock = iter(part), threading.Lock()
    start = time.monotonic()

    def work() -> None:
        while True:
            with lock:
                seed, at = next(left, (None, 0.0))
            if seed is None:
                return
            time.sleep(max(start + at - time.monotonic(), 0))
            load.run(seed)

    run_threads([threading.Thread(target=work) for _ in range(CLIENTS)])
    wait_until(load.server.is_idle, 120)
    time.sleep(2 * HANG_S)  # connections that hang
    return Memory.measure()


def inject_memory_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one forward in so many over several rows find no memory."""
    score, calls = CausalTarget.score, iter(range(1, 10**9))

    def fail_sometimes(self: Any, context: Any, draft: Any) -> Any:
        if context.batch > 1 and next(calls) % MEMORY_FAULT == 0:
            raise torch.OutOfMemoryError("no memory")
        return score(self, context, draft)

    monkeypatch.setattr(CausalTarget, "score", fail_sometimes)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_mixed_load_with_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmspec.serving.limits.MAX_READ_S", HANG_S)
    limit_arenas()
    loaded = load_models(MODEL, "vlm", None, ["coupled"])
    server = Server(make_served(loaded, options(max_requests=6, max_queue=4)))
    load = Load(server)
    inject_memory_faults(monkeypatch)
    start, used = time.monotonic(), time.process_time()
    parts = split_load(arrivals())
    sizes = list[Memory]()
    for part in parts:
        sizes.append(run_part(load, part))
        sys.stderr.write(f"\n{time.monotonic() - start:.0f} s: {sizes[-1]}, wrong: {load.wrong}")
    share = (time.process_time() - used) / (time.monotonic() - start)
    counters, outcomes = server.engine.counters, load.outcomes
    server.close()
    count = sum(map(len, parts))
    sys.stderr.write(
        f"\n{count} requests in {time.monotonic() - start:.0f} s, {share:.0%} of a core: "
        f"{dict(outcomes)}\n{counters}\n"
    )
    assert not load.wrong
    assert sum(outcomes.values()) == count
    ended = counters.completed + counters.failed + counters.cancelled + counters.expired
    assert counters.submitted == ended
    assert not counters.failed
    assert counters.refused >= outcomes["refused"]
    assert counters.completed >= sum(outcomes[kind] for kind in GOOD) + load.num_first
    assert counters.restarted or count < MIN_LOAD
    rest = sum(map(len, parts[PARTS // 3 :]))
    assert count < MIN_LOAD or sizes[-1].find_growth(sizes[PARTS // 3 - 1], rest) is None


@pytest.mark.slow
def test_what_requests_leave_behind_is_found() -> None:
    """A tensor, or a few objects, that each of many requests would leave."""
    count = 4 * FREE_GROWTH
    before = Memory.measure()
    assert Memory.measure().find_growth(before, count) is None
    tensors = [torch.zeros(512) for _ in range(count)]
    assert "bytes in use" in str(Memory.measure().find_growth(before, count))
    del tensors
    lists = [[index, [index]] for index in range(count)]
    assert "objects" in str(Memory.measure().find_growth(before, count))
    del lists
    assert Memory.measure().find_growth(before, count) is None
