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
