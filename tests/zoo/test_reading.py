"""The reader of pictures: right on what was drawn, silent on what was not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from torch.nn import functional

from mmspec.zoo.reading import read, read_all, score_picture
from mmspec.zoo.scene import COLOURS, SHAPES, SIZES, Scene, Thing, sample

SCENES = [sample(seed) for seed in range(100)]
Spoil = Callable[[Image.Image], "Image.Image | np.ndarray"]


def share_right(size: int, spoil: Spoil) -> float:
    shown = read_all([spoil(scene.render(size)) for scene in SCENES])
    scored = [score_picture(scene, found) for scene, found in zip(SCENES, shown, strict=True)]
    return sum(right for right, _ in scored) / sum(asked for _, asked in scored)


def noisy(deviation: float) -> Spoil:
    generator = np.random.default_rng(0)

    def spoil(image: Image.Image) -> np.ndarray:
        pixels = np.asarray(image) / 255
        return np.clip(pixels + deviation * generator.normal(size=pixels.shape), 0, 1)

    return spoil


def blurred(cells: float) -> Spoil:
    return lambda image: image.filter(ImageFilter.GaussianBlur(cells * image.width / 3))


@pytest.mark.parametrize("size", [32, 48, 64, 192])
def test_pictures_are_read_back(size: int) -> None:
    shown = read_all([scene.render(size) for scene in SCENES])
    same = [a.facts() == b.facts() for a, b in zip(SCENES, shown, strict=True)]
    assert np.mean(same) >= 0.99


def test_everything_there_is_to_draw_is_read_back() -> None:
    kinds = [(shape, None) for shape in SHAPES] + [("digit", digit) for digit in range(10)]
    scenes = [
        Scene((Thing(shape, colour, size, 2, 0, digit, (0.05, -0.05)),))
        for shape, digit in kinds
        for colour in COLOURS
        for size in SIZES
    ]
    shown = read_all([scene.render(48) for scene in scenes])
    assert [s.facts() for s in shown] == [s.facts() for s in scenes]
    assert all(abs(s.things[0].shift[0] - 0.05) < 0.03 for s in shown)


@pytest.mark.parametrize(
    ("size", "spoil", "least"),
    [
        (32, noisy(0.05), 0.99),
        (48, noisy(0.05), 0.99),
        (32, noisy(0.1), 0.97),
        (48, noisy(0.1), 0.99),
        (32, blurred(1 / 32), 0.98),
        (48, blurred(1 / 32), 0.99),
        (48, blurred(1 / 16), 0.97),
        (192, blurred(1 / 16), 0.95),
    ],
)
def test_noise_and_blur_are_forgiven(size: int, spoil: Spoil, least: float) -> None:
    assert share_right(size, spoil) >= least


def test_a_hopeless_blur_is_noticed() -> None:
    assert share_right(48, blurred(0.2)) < 0.6


def uniform(generator: np.random.Generator, size: int) -> np.ndarray:
    return generator.random((size, size, 3))


def normal(generator: np.random.Generator, size: int) -> np.ndarray:
    return np.clip(0.5 + 0.5 * generator.normal(size=(size, size, 3)), 0, 1)


def clouds(generator: np.random.Generator, size: int) -> np.ndarray:
    coarse = torch.from_numpy(generator.random((1, 3, 6, 6)))
    smooth = functional.interpolate(coarse, (size, size), mode="bicubic")
    return smooth[0].permute(1, 2, 0).clamp(0, 1).numpy()


@pytest.mark.parametrize("size", [32, 48, 192])
@pytest.mark.parametrize("make", [uniform, normal, clouds])
def test_nothing_is_seen_in_noise(make: Callable[..., np.ndarray], size: int) -> None:
    generator = np.random.default_rng(1)
    shown = read_all([make(generator, size) for _ in range(20)])
    assert sum(len(scene.things) for scene in shown) == 0


@pytest.mark.parametrize("level", [0.0, 0.5, 1.0])
def test_nothing_is_seen_on_a_plain_canvas(level: float) -> None:
    assert read(np.full((48, 48, 3), level)) == Scene(())


def test_bytes_floats_and_images_are_one_picture() -> None:
    image = SCENES[3].render(48)
    array = np.asarray(image)
    assert read(image) == read(array) == read(array / 255)
    assert read_all([]) == []


@pytest.mark.parametrize("shape", [(48, 40, 3), (48, 48), (3, 48, 48)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be"):
        read(np.zeros(shape))


@pytest.mark.parametrize(
    ("changes", "right"),
    [
        ({}, 4),
        ({"colour": "blue"}, 3),
        ({"size": "small", "row": 1}, 2),
        ({"shape": "ring", "colour": "black"}, 2),
    ],
)
def test_each_wrong_fact_costs_one(changes: dict[str, object], right: int) -> None:
    thing = Thing("star", "red", "large", 0, 2)
    wanted = Scene((thing,))
    drawn = Scene((replace(thing, **changes),))  # type: ignore[arg-type]
    assert score_picture(wanted, drawn.render(48)) == (right, 4)


def test_things_made_up_and_things_missing_cost() -> None:
    one = Thing("star", "red", "large", 0, 2)
    two = Thing("digit", "green", "small", 2, 2, 4)
    assert score_picture(Scene((one,)), Scene((one, two)).render(48)) == (4, 5)
    assert score_picture(Scene((one, two)), Scene((one,)).render(48)) == (4, 8)
    assert score_picture(Scene((one, two)), Scene(()).render(48)) == (0, 8)
