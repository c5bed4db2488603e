"""Simulated streams against closed forms of queueing theory, and the limits that they name."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from time import monotonic, sleep

import pytest
import torch

import mmspec
from mmspec.bench.planning.costs import Decoding, Split, expected_tokens
from mmspec.bench.planning.devices import H100, Device
from mmspec.bench.planning.simulation import Simulation, Stream
from mmspec.bench.studies.shapes import SHAPES, build_model, random_prompt
from mmspec.serving.scheduler import Limits

TARGET = Split(SHAPES["qwen2.5-vl-7b"], H100)
# every forward takes 28 layers x 1 ms, whatever its size
CONSTANT = Device("constant", 1e30, 1e30, 1e12, layer_seconds=1e-3)
CLOCK = Decoding(Split(SHAPES["qwen2.5-vl-7b"], CONSTANT))


LOADS = [0.6, *(pytest.param(load, marks=pytest.mark.exhaustive) for load in (0.3, 0.8))]


@pytest.mark.parametrize("load", LOADS)
def test_one_row_is_a_queue_with_constant_service(load: float) -> None:
    """M/D/1: the mean wait is rho D / (2 (1 - rho)) (Pollaczek and Khinchine)."""
    output = 10
    service = 28e-3 * output  # one prompt, which gives the first token, and nine rounds
    stream = Stream(load / service, requests=8000, output=output, is_constant=True, seed=1)
    found = Simulation(CLOCK, Limits(max_rows=1, max_queue=8000)).run(stream)
    expected = load * service / (2 * (1 - load))
    assert found.mean_wait == pytest.approx(expected, rel=0.15)
    assert found.utilisation == pytest.approx(load, rel=0.03)
    assert found.completed == 8000


def test_alone_a_request_takes_the_seconds_of_its_forwards() -> None:
    stream = Stream(1e-3, requests=20, output=10, is_constant=True)
    found = Simulation(CLOCK, Limits()).run(stream)
    assert found.p50_seconds == pytest.approx(0.28)
    assert found.p99_seconds == pytest.approx(0.28)
    assert found.p50_first_token == pytest.approx(0.028)
    assert found.bottleneck == found.limit == "none"


def test_drafts_shorten_a_request_by_the_expected_tokens() -> None:
    stream = Stream(1e-3, requests=200, output=1000, is_constant=True)
    plain = Simulation(CLOCK, Limits()).run(stream)
    fast = Simulation(CLOCK, Limits(), length=3, acceptance=0.8).run(stream)
    ratio = plain.p50_seconds / fast.p50_seconds
    assert ratio == pytest.approx(expected_tokens(3, 0.8), rel=0.02)


def test_the_same_seed_gives_the_same_outcome() -> None:
    def run(seed: int) -> object:
        stream = Stream(20.0, requests=300, seed=seed)
        return Simulation(Decoding(TARGET), Limits(max_rows=32), 3, 0.7, seed).run(stream)

    assert run(0) == run(0) != run(1)


def test_what_is_short_is_named() -> None:
    flood = Stream(2000.0, requests=600, prompt=256, output=512)
    wide = Limits(max_rows=512, max_queue=1000, max_prompt_slots=1 << 16)
    decoding = Decoding(TARGET)

    def name(limits: Limits, decoding: Decoding = decoding, stream: Stream = flood) -> str:
        return Simulation(decoding, limits).run(stream).bottleneck

    assert name(Limits(max_rows=4, max_queue=1000)) == "rows"
    assert name(replace(wide, max_slots=8000)) == "cache"
    slow_host = Decoding(Split(TARGET.shape, replace(H100, round_seconds=1.0)))
    assert name(replace(wide, max_rows=64), slow_host) == "host"
    long_prompts = replace(flood, prompt=16384, output=8, requests=100)
    assert name(wide, decoding, long_prompts) == "compute (prompts)"
    assert Simulation(decoding, Limits(max_queue=2)).run(flood).refused > 0


def test_a_long_prompt_is_read_in_chunks_between_rounds() -> None:
    stream = Stream(1e-3, requests=5, prompt=5000, output=10, is_constant=True)
    found = Simulation(CLOCK, Limits(max_prompt_slots=2048)).run(stream)
    assert found.p50_first_token == pytest.approx(3 * 0.028)
    assert found.p50_seconds == pytest.approx(12 * 0.028)


@pytest.mark.slow
def test_an_engine_takes_the_simulated_times() -> None:
    """At a third of its capacity, within a factor of two: this machine has other work, too."""
    stream = Stream(1.0, requests=40, prompt=16, output=48, is_constant=True, seed=2)
    model = build_model("tiny", torch.device("cpu"), torch.float32)
    given = {**random_prompt(512, 16, torch.device("cpu")), "do_sample": False}
    given["max_new_tokens"] = stream.output
    with mmspec.Engine(mmspec.accelerate(model, "plain"), max_queue=64) as engine:
        alone = median(engine.submit(given).result().seconds for _ in range(8))
        stream = replace(stream, rate=1 / (3 * alone))
        begun, futures = monotonic(), []
        for arrival in stream.arrivals():
            sleep(max(begun + arrival.at - monotonic(), 0))
            futures.append(engine.submit(given))
        found = sorted(one.result().seconds for one in futures)
    layers = SHAPES["tiny"].layers
    device = replace(CONSTANT, layer_seconds=alone / (stream.output * layers))
    expected = Simulation(Decoding(Split(SHAPES["tiny"], device)), Limits()).run(stream)
    assert found[20] == pytest.approx(expected.p50_seconds, rel=1.0)
    assert expected.p50_seconds < 2 * found[20]
    assert found[30] < 2 * expected.p99_seconds  # three quarters; the rest is that of the machine
