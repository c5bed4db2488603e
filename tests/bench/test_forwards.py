"""Recorded forwards are those of the run, and replaying them changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

import mmspec
from mmspec import recipes
from mmspec.bench import efficiency
from mmspec.bench.efficiency import measure_efficiency
from mmspec.bench.forwards import Forward, Replay, Tape, record_forwards, replay, time_forwards
from mmspec.modalities.common.measures import SpeculativeGenerate
from mmspec.modalities.common.tiny_models import random_drafter
from mmspec.modality import RunResult
from tests import toys
from tests.covering import limited
from tests.modalities import drawing
from tests.partners import skip_checks
from tests.toys import image_models

ROOM = 16


@pytest.mark.parametrize(
    "family", limited(["llama", "llava", "qwen2_5_vl", "gemma3", "paligemma", "lfm2"], 3)
)
def test_every_forward_is_recorded_once(family: str) -> None:
    target = toys.model(family)
    fast = skip_checks(mmspec.accelerate(target, drafter=toys.model(family, seed=1)))
    with record_forwards(fast) as tape:
        out = fast.generate(**toys.inputs(family), max_new_tokens=ROOM)
    own = {id(module) for module in (target, target.get_decoder())}
    calls = [call for call in tape.forwards if id(call.module) in own]
    assert len(calls) == out.stats.target_calls + 1  # and the prefill
    assert [call.is_first for call in calls] == [True] + [False] * out.stats.target_calls
    assert len(tape.caches) == 2
    assert [call.is_first for call in tape.forwards[: tape.prompts]].count(True) == 2
    assert not target._forward_pre_hooks


def test_shared_layers_are_recorded_on_the_target_s_cache() -> None:
    fast = skip_checks(mmspec.accelerate(toys.model("llama", layers=4), "layer-skip"))
    with record_forwards(fast) as tape:
        fast.generate(**toys.inputs("llama"), max_new_tokens=ROOM)
    assert len(tape.caches) == 1
    assert len({id(call.module) for call in tape.forwards}) >= 3  # thin and full decoder, head


def test_a_feature_head_is_recorded_on_a_cache_of_its_own() -> None:
    model = toys.model("llava")
    head = random_drafter(recipes.get("eagle"), model)
    fast = skip_checks(mmspec.accelerate(model, "eagle", drafter=head))
    with record_forwards(fast) as tape:
        out = fast.generate(**toys.inputs("llava"), max_new_tokens=ROOM)
    calls = [call for call in tape.forwards if call.module is head]
    assert [call.is_first for call in calls] == [True] + [False] * (len(calls) - 1)
    assert len(calls) > out.stats.target_calls
    assert len(tape.caches) == 2
    replay(tape, torch.device("cpu"))


@pytest.mark.parametrize("recipe", ["dflash", "p-eagle"])
def test_the_cache_of_a_parallel_head_is_recorded(recipe: str) -> None:
    """A replay writes to copies: the cache of the run is not part of the tape."""
    model = toys.model("llava")
    head = random_drafter(recipes.get(recipe), model)
    fast = skip_checks(mmspec.accelerate(model, recipe, drafter=head))
    with record_forwards(fast) as tape:
        fast.generate(**toys.inputs("llava"), max_new_tokens=ROOM)
    calls = [call for call in tape.forwards if call.module is head]
    assert calls
    assert all(call.cache == 1 for call in calls)
    replay(tape, torch.device("cpu"))


def test_a_replay_computes_what_the_run_computed() -> None:
    target = toys.model("llava")
    fast = skip_checks(mmspec.accelerate(target, "plain"))
    seen: list[list[torch.Tensor]] = [[], []]
    with record_forwards(fast) as tape, _outputs(target, seen[0]):
        fast.generate(**toys.inputs("llava"), max_new_tokens=ROOM)
    with _outputs(target, seen[1]):
        replay(tape, torch.device("cpu"))
    assert len(seen[0]) == len(seen[1]) == ROOM
    for mine, other in zip(*seen, strict=True):
        torch.testing.assert_close(mine, other, atol=0, rtol=0)


@pytest.mark.parametrize("family", ["janus", "llamagen-caption", "emu3"])
def test_forwards_of_models_that_draw_are_recorded_and_replayed(family: str) -> None:
    """Both branches of guidance, tables of codes included; every call on the cache it was on."""
    toy = image_models.PAINTERS[family]()
    fast = mmspec.accelerate(toy, "coupled", drafter=drawing.noisy(family), length=3)
    with record_forwards(fast) as tape:
        out = fast.generate_images(**image_models.request(family, 1), **drawing.sized(family))
    decoder = fast.session.bound.backbone.decoder
    calls = [call for call in tape.forwards if call.module is decoder]
    if family == "emu3":  # reads its prompt through the whole model
        calls = [call for call in tape.forwards if call.module in (toy, decoder)]
    assert len(calls) == out.stats.target_calls + 1
    assert [call.is_first for call in calls] == [True] + [False] * out.stats.target_calls
    assert len(tape.caches) == 2
    again: list[torch.Tensor] = []
    handle = decoder.register_forward_hook(lambda *call: again.append(call[2].last_hidden_state))
    replay(tape, torch.device("cpu"))
    handle.remove()
    assert [states.shape[:2] for states in again] == [_carrier(call).shape[:2] for call in calls]
    assert {len(states) for states in again} == {2}


def _carrier(call: Forward) -> torch.Tensor:
    given = [call.kwargs.get(name) for name in ("inputs_embeds", "input_ids")]
    found: torch.Tensor = next(value for value in given if value is not None)
    return found


def test_efficiency_is_a_share() -> None:
    fast = mmspec.accelerate(toys.model("llama"), "plain")
    request = {**toys.inputs("llama"), "do_sample": False, "max_new_tokens": ROOM}
    entered = {"plain": SpeculativeGenerate(fast)}
    found = measure_efficiency(entered, [request], 2, 0, torch.device("cpu"))
    assert found["plain"].share == found["plain"].forwards / found["plain"].wall > 0


def test_medians_of_the_requests_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = iter([[(2.0, 1.0), (9.0, 0.5), (3.0, 7.0)], [(1.0, 1.0)] * 3])

    def timed(*_: Any) -> Any:
        return [[(run, Replay(0.25, alone - 0.25)) for run, alone in next(turns)]]

    monkeypatch.setattr(efficiency, "run_and_replay", timed)
    found = measure_efficiency({"one": Slow()}, [{}, {}], 3, 0, torch.device("cpu"))["one"]
    assert (found.wall, found.forwards, found.share) == (4.0, 2.0, 0.5)


class Slow:
    """Counts its calls, takes a second more the first time, and runs nothing."""

    def __init__(self) -> None:
        self.now, self.runs, self.replays = 0.0, 0, 0

    def read_clock(self, device: torch.device) -> float:
        return self.now

    def run(self, request: Mapping[str, Any], seed: int) -> RunResult:
        self.runs += 1
        self.now += 2.0 if self.runs == 1 else 1.0
        return RunResult([[0]], 1, 1.0)

    def run_first_token(self, request: Mapping[str, Any], seed: int) -> None:
        return None

    def replayed(self, tape: Tape, device: torch.device) -> Replay:
        self.replays += 1
        return Replay(0.0, 5.0 if self.replays == 1 else 0.5)


def test_run_and_replay_are_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow()
    monkeypatch.setattr(efficiency, "read_clock", slow.read_clock)
    monkeypatch.setattr(efficiency, "replay", slow.replayed)
    (pairs,) = efficiency.run_and_replay([slow], {}, 3, 0, torch.device("cpu"))
    assert [(run, alone.total) for run, alone in pairs] == [(1.0, 0.5)] * 3


def test_the_stopwatch_sees_all_forwards() -> None:
    fast = skip_checks(mmspec.accelerate(toys.model("llama"), "plain"))
    with time_forwards(fast, torch.device("cpu")) as spent:
        fast.generate(**toys.inputs("llama"), max_new_tokens=ROOM)
    assert len(spent) == 1 + 2 * (ROOM - 1)  # prefill, then decoder and head
    assert all(seconds > 0 for seconds in spent)


class _outputs:
    """Collect the last hidden states of a model's decoder."""

    def __init__(self, model: torch.nn.Module, into: list[torch.Tensor]) -> None:
        self.model, self.into = model, into

    def __enter__(self) -> None:
        decoder = self.model.get_decoder()  # type: ignore[operator]
        self.handle = decoder.register_forward_hook(
            lambda *call: self.into.append(call[2].last_hidden_state.clone())
        )

    def __exit__(self, *error: object) -> None:
        self.handle.remove()
