"""Recorded calls of a network, replayed for other states."""

from __future__ import annotations

import pytest
import torch

from mmspec.modalities.diffusion.conditions import Recorder


def test_conditions_are_tiled_by_picture_and_branch() -> None:
    states, words = torch.zeros(4, 3), torch.arange(4.0)[:, None]
    places = torch.arange(4)
    recorder = Recorder((states, torch.tensor(30)), {"c": {"words": words}, "img_ids": places})
    for t in (20, 10):
        recorder.add((states, torch.tensor(t)), {"c": {"words": words.clone()}, "img_ids": places})
    rows = torch.tensor([1, 0, 1, 3, 2, 3])  # pictures 1, 0, 1 in two branches of two pictures
    shown = torch.randn(6, 3)
    args, kwargs = recorder.call().replay(shown, rows, torch.tensor([2, 0, 1, 2, 0, 1]))
    assert torch.equal(args[0], shown)
    assert args[1].tolist() == [10, 30, 20, 10, 30, 20]
    assert kwargs["c"]["words"][:, 0].tolist() == [1, 0, 1, 3, 2, 3]
    assert kwargs["img_ids"] is places


def test_conditions_that_follow_the_state_are_refused() -> None:
    states, residual = torch.zeros(2, 3), torch.zeros(2, 5)
    recorder = Recorder((states,), {"residual": residual, "t": 3.0})
    with pytest.raises(ValueError, match=r"'residual' to its network.*ControlNet"):
        recorder.add((states,), {"residual": residual + torch.arange(5), "t": 2.0})


def test_what_is_shown_beside_the_latents_is_the_same_in_every_step() -> None:
    picture, latents = torch.randn(2, 5, 4), torch.randn(3, 2, 3, 4)
    recorder = Recorder((torch.cat((latents[0], picture), 1),), {})
    assert recorder.shows(latents[0])
    assert not recorder.shows(latents[1])
    recorder.add((torch.cat((latents[1], picture), 1),), {})
    assert recorder.shows(latents[1])
    rows = torch.tensor([1, 1, 0])
    whole = recorder.call().completed(torch.zeros(3, 3, 4), rows)
    assert torch.equal(whole, torch.cat((torch.zeros(3, 3, 4), picture[rows]), 1))
    recorder.add((torch.cat((latents[2], picture + 1), 1),), {})
    assert not recorder.shows(latents[2])
    recorder.add((torch.cat((picture, latents[2]), 1),), {})
    assert not recorder.shows(latents[2])  # not in front of them
    recorder.add((latents[2],), {})
    assert not recorder.shows(latents[2])  # and in all steps or in none
    assert not recorder.shows(torch.cat((latents[2], picture), 1))
