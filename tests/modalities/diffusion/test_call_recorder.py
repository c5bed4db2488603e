"""Recorded calls of a network, replayed for other states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.modalities.diffusion.call_recorder import Recorder
from mmspec.modalities.diffusion.conditions import Residual


def recorded(*calls: tuple[tuple[Any, ...], dict[str, Any]], runs: int = 1) -> Recorder:
    """One call per step, in `runs` runs."""
    recorder = Recorder("unet", *calls[0])
    for _ in range(runs):
        for step, (args, kwargs) in enumerate(calls):
            recorder.add(step, args, kwargs)
    return recorder


def test_conditions_are_tiled_by_picture_and_branch() -> None:
    states, words = torch.zeros(4, 3), torch.arange(4.0)[:, None]
    places = torch.arange(4)
    recorder = recorded(
        *(
            ((states, torch.tensor(t)), {"c": {"words": words.clone()}, "img_ids": places})
            for t in (30, 20, 10)
        )
    )
    assert recorder.is_sure
    rows = torch.tensor([1, 0, 1, 3, 2, 3])  # pictures 1, 0, 1 in two branches of two pictures
    shown = torch.randn(6, 3)
    call = recorder.call(3)
    args, kwargs = call.replay(shown, rows, torch.tensor([2, 0, 1, 2, 0, 1]))
    assert torch.equal(args[0], shown)
    assert args[1].tolist() == [10, 30, 20, 10, 30, 20]
    assert kwargs["c"]["words"][:, 0].tolist() == [1, 0, 1, 3, 2, 3]
    assert kwargs["img_ids"] is places
    assert [rows.tolist() for rows in call.groups(torch.tensor([2, 0, 1]))] == [[0, 1, 2]]


def test_conditions_that_follow_the_state_are_refused() -> None:
    """State-dependent values differ between two runs; a schedule is the same in both."""
    states, residual = torch.zeros(2, 3), torch.zeros(2, 5)

    def call(shift: float) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (states,), {"residual": residual + torch.arange(5) + shift, "t": 3.0}

    recorder = recorded(call(0.0), call(1.0))
    assert not recorder.is_sure  # one run proves nothing
    with pytest.raises(ValueError, match=r"'residual' to its network.*ControlNet"):
        recorder.add(0, *call(2.0))
    assert recorded(call(0.0), call(1.0), runs=2).is_sure
    assert not recorded(call(0.0)).is_sure


def test_tensors_of_a_schedule_are_passed_to_every_row_of_its_step() -> None:
    """For example one timestep per token: rows of different steps share a call."""
    times = [torch.tensor([[0.0, t, t], [0.0, t, 2 * t]]) for t in (3.0, 2.0, 1.0)]
    call = recorded(*(((torch.zeros(2, 4), t), {}) for t in times), runs=2).call(3)
    steps, rows = torch.tensor([2, 0, 1, 1]), torch.tensor([0, 1, 1, 0])
    args, _ = call.replay(torch.zeros(4, 4), rows, steps)
    assert torch.equal(
        args[1], torch.stack([times[s][r] for s, r in zip(steps, rows, strict=True)])
    )
    assert len(call.groups(steps)) == 1


def test_rows_with_different_python_scalars_use_separate_calls() -> None:
    """A Python scalar applies to a whole call: the strength of a ControlNet that ends early."""
    told = (1.0, 1.0, 0.0)
    call = recorded(*(((torch.zeros(2, 4),), {"scale": [s, 0.5]}) for s in told), runs=2).call(3)
    groups = call.groups(torch.tensor([0, 2, 1, 2]))
    assert [rows.tolist() for rows in groups] == [[0, 2], [1, 3]]
    _, kwargs = call.replay(
        torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64), torch.tensor([2, 2])
    )
    assert kwargs["scale"] == [0.0, 0.5]


def test_residuals_are_known_by_their_numbers() -> None:
    """Per branch, zeros for branches without residuals, and per step."""
    recorder: Recorder | None = None

    def step(place: int, given: Tensor, computed: list[list[Tensor]]) -> None:
        nonlocal recorder
        kwargs = {"fixed": torch.zeros(4, 2), "residual": given}
        recorder = recorder or Recorder("unet", (torch.zeros(4, 3),), kwargs)
        recorder.add(place, (torch.zeros(4, 3),), kwargs, computed, images=2)

    for place in range(2):
        one, other = torch.randn(2, 5), torch.randn(2, 5)
        step(place, torch.cat((torch.zeros_like(other), other)), [[one, other]])
    assert recorder is not None
    assert recorder.call(2).residuals == {(1, "residual"): Residual(0, 1, (None, 0))}
    parts = [[(torch.ones(3, 5),), (torch.full((3, 5), 2.0),)]]
    made = recorder.call(2).residuals[(1, "residual")].of(parts)
    assert made[:, 0].tolist() == [0, 0, 0, 2, 2, 2]
    with pytest.raises(ValueError, match="'residual' to its network"):
        step(2, torch.randn(4, 5), [[one, other]])


def test_states_may_come_as_a_list() -> None:
    """Prompts are lists too; the states have an axis that the latents lack (Z-Image)."""
    latents, words = torch.randn(2, 2, 3, 4), [torch.full((n, 2), float(n)) for n in (1, 2)]
    calls: list[tuple[Any, dict[str, Any]]] = [
        ((list(one.unsqueeze(2)), words), {}) for one in latents
    ]
    recorder = Recorder("transformer", *calls[0])
    for step, (args, kwargs) in enumerate(calls):
        recorder.add(step, args, kwargs)
        assert recorder.matches_states(latents[step])
    call = recorder.call(2)
    shown = torch.randn(3, 3, 4)
    rows = torch.tensor([1, 0, 1])
    args, _ = call.replay(call.complete_states(shown, rows), rows, torch.tensor([0, 1, 1]))
    assert torch.equal(torch.stack(args[0]), shown.unsqueeze(2))
    assert [len(one) for one in args[1]] == [2, 1, 2]
    assert call.strip_output(torch.zeros(3, 3, 1, 4)).shape == shown.shape
    with pytest.raises(ValueError, match="1 to its network"):  # the entry of row 1
        recorder.add(2, (args[0][:2], [words[0], words[0]]), {})


def test_what_is_shown_beside_the_latents_is_the_same_in_every_step() -> None:
    picture, latents = torch.randn(2, 5, 4), torch.randn(3, 2, 3, 4)

    def add(shown: Tensor) -> None:
        recorder.add(len(recorder.runs), (shown,), {})

    recorder = Recorder("unet", (torch.cat((latents[0], picture), 1),), {})
    add(torch.cat((latents[0], picture), 1))
    assert recorder.matches_states(latents[0])
    assert not recorder.matches_states(latents[1])
    add(torch.cat((latents[1], picture), 1))
    assert recorder.matches_states(latents[1])
    rows = torch.tensor([1, 1, 0])
    whole = recorder.call(2).complete_states(torch.zeros(3, 3, 4), rows)
    assert torch.equal(whole, torch.cat((torch.zeros(3, 3, 4), picture[rows]), 1))
    add(torch.cat((latents[2], picture + 1), 1))
    assert not recorder.matches_states(latents[2])
    add(torch.cat((picture, latents[2]), 1))
    assert not recorder.matches_states(latents[2])  # not before them now
    add(latents[2])
    assert not recorder.matches_states(latents[2])  # and in all steps or in none
    assert not recorder.matches_states(torch.cat((latents[2], picture), 1))


def test_what_replaces_a_part_of_the_latents_is_known_by_its_places() -> None:
    """A first frame inside the latents, confirmed only if every step was recorded twice."""
    frame, latents = torch.randn(2, 3), torch.randn(4, 2, 3, 4)
    recorder: Recorder | None = None
    for draw, one in enumerate(latents):
        shown = one.clone()
        shown[..., 0] = frame
        recorder = recorder or Recorder("unet", (shown,), {})
        recorder.add(draw % 2, (shown,), {})
        assert recorder.matches_states(one)
        assert recorder.is_sure is (draw == 3)
    assert recorder is not None
    rows = torch.tensor([1, 0, 1])
    states = torch.randn(3, 3, 4)
    whole = recorder.call(2).complete_states(states, rows)
    assert torch.equal(whole[..., 0], frame[rows])
    assert torch.equal(whole[..., 1:], states[..., 1:])
    other = torch.randn(2, 3, 4)
    recorder.add(1, (other.clone().index_fill_(2, torch.tensor([0]), 7.0),), {})
    assert not recorder.matches_states(other)


def test_what_stands_before_the_latents_is_cut_off_the_output() -> None:
    frame, latents = torch.randn(2, 3, 1), torch.randn(2, 3, 4)
    recorder = Recorder("unet", (torch.cat((frame, latents), 2),), {})
    recorder.add(0, (torch.cat((frame, latents), 2),), {})
    assert recorder.matches_states(latents)
    output = torch.randn(2, 3, 5)
    assert torch.equal(recorder.strip_output(output), output[..., 1:])
    assert torch.equal(recorder.strip_output(output[..., 1:]), output[..., 1:])
