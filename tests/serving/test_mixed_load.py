"""A long mixed load with faults: nothing is lost, nothing comes twice, and memory stays flat.

MMSPEC_LOAD=1000 pytest -m slow tests/serving/test_mixed_load.py
"""

from __future__ import annotations

import json
import os
import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mmspec.cli.models import load_models
from mmspec.cli.serve import make_served
from tests.serving.test_server import MODEL, Server, openai, options, question, wait_until

COUNT = int(os.environ.get("MMSPEC_LOAD", "60"))
CLIENTS = 8
MAX_GROWTH = 64 << 20  # bytes of the process from the first quarter to the end
FAULTS = ("abandon", "garbage", "stall", "unknown", "closed")  # of one request in three


class Load:
    """Requests of several clients, with the text that each prompt gets alone."""

    def __init__(self, server: Server, prompts: list[str]) -> None:
        self.server = server
        self.expected = {one: self.ask(one) for one in prompts}
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.lock = threading.Lock()

    def ask(self, prompt: str, **more: Any) -> str:
        reply = self.server.chat(question(prompt), **more)
        return str(reply.choices[0].message.content)

    def run(self, seed: int) -> None:
        choose = random.Random(seed)
        prompt = choose.choice([*self.expected])
        kind = (
            choose.choice(FAULTS) if choose.random() < 1 / 3 else choose.choice(("ask", "stream"))
        )
        try:
            text = getattr(self, f"_{kind}")(prompt)
        except openai.RateLimitError:
            kind, text = "refused", None
        with self.lock:
            self.outcomes[kind] += 1
            if text is not None and text != self.expected[prompt]:
                self.wrong.append(f"{kind} {prompt!r}: {text!r}")

    def _ask(self, prompt: str) -> str:
        return self.ask(prompt)

    def _stream(self, prompt: str) -> str:
        chunks = self.server.chat(question(prompt), stream=True)
        return "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)

    def _abandon(self, prompt: str) -> None:
        stream = self.server.chat(question(prompt), stream=True)
        next(iter(stream))
        stream.close()

    def _garbage(self, prompt: str) -> None:
        with self.server.send(b"{" + prompt.encode()) as connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 400")

    def _stall(self, prompt: str) -> None:
        with self.server.send(b"{", 1000):
            pass

    def _unknown(self, prompt: str) -> None:
        with pytest.raises(openai.BadRequestError):
            self.ask(prompt, presence_penalty=1)

    def _closed(self, prompt: str) -> None:
        body = {"model": MODEL, "messages": question(prompt), "temperature": 0}
        self.server.send(json.dumps(body).encode()).close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_mixed_load_with_faults() -> None:
    loaded = load_models(MODEL, "vlm", None, ["coupled"])
    server = Server(make_served(loaded, options(max_requests=6, max_queue=4)))
    prompts = ["describe the picture", "what is in the center?", "how many things are there?"]
    load, left, sizes = Load(server, prompts), iter(range(COUNT)), list[int]()
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                seed = next(left, None)
                if seed == COUNT // 4:
                    sizes.append(resident_bytes())
            if seed is None:
                return
            load.run(seed)

    threads = [threading.Thread(target=work) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(server.is_idle)
    sizes.append(resident_bytes())
    counters = server.engine.counters
    server.close()
    assert not load.wrong
    assert sum(load.outcomes.values()) == COUNT
    ended = counters.completed + counters.failed + counters.cancelled + counters.expired
    assert counters.submitted == ended
    assert not counters.failed
    assert counters.refused >= load.outcomes["refused"]
    asked = load.outcomes["ask"] + load.outcomes["stream"]
    assert counters.completed >= asked + len(prompts)
    assert sizes[-1] - sizes[0] < MAX_GROWTH
