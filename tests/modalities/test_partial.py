"""Partial images of a stream: only what is verified so far."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mmspec
from tests import toys
from tests.covering import covering
from tests.modalities.drawing import sized
from tests.toys import image_models, mar
from tests.toys.pipelines import build_request, pipeline

GREY = 128


def streamed(fast: Any, **request: Any) -> tuple[list[Any], Any]:
    """All rounds, and what the call returns."""
    stream, rounds = fast.stream(**request), []
    while True:
        try:
            rounds.append(next(stream))
        except StopIteration as end:
            return rounds, end.value


def find_drawn_cells(picture: Any, cells: tuple[int, int]) -> Any:  # (H, W) bool
    """Which cells are not grey all over."""
    height, width = cells
    pixels = np.asarray(picture).astype(int)
    down, across = pixels.shape[0] // height, pixels.shape[1] // width
    tiles = pixels.reshape(height, down, width, across, 3)
    return np.abs(tiles - GREY).max((1, 3, 4)) > 1


@pytest.mark.parametrize(
    ("recipe", "family"), covering(["sjd", "zipar"], image_models.PAINTERS, strength=1)
)
def test_a_round_shows_the_cells_that_are_drawn(family: str, recipe: str) -> None:
    fast = mmspec.accelerate(image_models.PAINTERS[family](), recipe)
    request = {**image_models.request(family, 2), **sized(family), "guidance": 2.0, "seed": 4}
    rounds, out = streamed(fast, **request)
    assert len(rounds) > 2
    for turn in (rounds[0], rounds[len(rounds) // 2], rounds[-1]):
        for row, picture in enumerate(turn.partial()):
            known = (out.rounds[row] <= turn.index).numpy()
            assert (find_drawn_cells(picture, known.shape) == known).all()
    for mine, whole in zip(rounds[-1].partial(), out.images, strict=True):
        assert np.array_equal(np.asarray(mine), np.asarray(whole))


class PixelInputs(nn.Module):
    """A VAE that shows the first channel, twice as large."""

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        pixels = latents[:, :1].repeat(1, 3, 1, 1).repeat_interleave(2, -1).repeat_interleave(2, -2)
        return pixels.sign() * 0.5 - 0.25  # never grey


def test_continuous_tokens_show_the_steps_that_are_taken() -> None:
    fast, model = mmspec.accelerate(mar.mar(), drafter=mar.mar(1)), mar.mar()
    request = {"class_labels": [1, 2], "steps": 4, "head_steps": 3, "guidance": 2.0, "seed": 1}
    rounds, out = streamed(fast, **request, last_noise=True, vae=PixelInputs())
    side, steps = model.config.side, 0
    sizes = []
    for turn in rounds:
        pictures = turn.partial()
        known = [find_drawn_cells(picture, (side, side)) for picture in pictures]
        sizes.append([int(one.sum()) for one in known])
        for one, picture, whole in zip(known, pictures, out.images, strict=True):
            scale = np.asarray(whole).shape[0] // side
            there = np.kron(one, np.ones((scale, scale))).astype(bool)
            assert np.array_equal(np.asarray(picture)[there], np.asarray(whole)[there])
        steps += len(turn.tokens[0])
    assert sizes == sorted(sizes)
    assert sizes[0][0] < sizes[-1][0] == side**2
    assert steps == 4
    with pytest.raises(ValueError, match="give vae="):
        next(fast.stream(**request, last_noise=True)).partial()


def test_what_draws_no_tokens_has_no_picture_so_far() -> None:
    text = mmspec.accelerate(toys.model("llama"))
    chain = mmspec.accelerate(pipeline("ddpm"), "asd")
    few = {**build_request("ddpm"), "num_inference_steps": 4}
    requests = ({**toys.inputs("llama"), "max_new_tokens": 2}, few)
    for fast, request in zip((text, chain), requests, strict=True):
        with pytest.raises(ValueError, match="there is no partial image"):
            next(fast.stream(**request)).partial()


def test_partial_outputs_cost_nothing_unless_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = mmspec.accelerate(image_models.PAINTERS["janus"](), "sjd")
    monkeypatch.setattr("mmspec.accelerated.PartialOutput", None)
    assert fast.generate_images(**image_models.request("janus"), seed=0).images
