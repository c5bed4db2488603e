"""The scene parser: right on rendered things, nothing elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from torch.nn import functional

from mmspec.zoo.backgrounds import Background
from mmspec.zoo.drawing import RGB
from mmspec.zoo.scene import COLOURS, SHAPES, Scene, Style, Thing, sample
from mmspec.zoo.scene_parser import parse_image, parse_images, score_picture
from tests.covering import covering, limited

STYLES: tuple[Style, ...] = ("plain", "textured")
SCENES: dict[Style, list[Scene]] = {
    style: [sample(seed, style) for seed in range(12)] for style in (*STYLES, "tiled")
}
Spoil = Callable[[Image.Image], "Image.Image | np.ndarray"]


def share_right(style: Style, size: int, spoil: Spoil) -> float:
    scenes = SCENES[style]
    shown = parse_images([spoil(scene.render(size)) for scene in scenes])
    scored = [score_picture(scene, found) for scene, found in zip(scenes, shown, strict=True)]
    return sum(right for right, _ in scored) / sum(asked for _, asked in scored)


def noisy(deviation: float) -> Spoil:
    generator = np.random.default_rng(0)

    def spoil(image: Image.Image) -> np.ndarray:
        pixels = np.asarray(image) / 255
        return np.clip(pixels + deviation * generator.normal(size=pixels.shape), 0, 1)

    return spoil


def blurred(cells: float) -> Spoil:
    return lambda image: image.filter(ImageFilter.GaussianBlur(cells * image.width / 3))


@pytest.mark.parametrize(("size", "style"), limited(covering((32, 48, 192), STYLES, strength=1), 2))
def test_pictures_are_read_back(style: Style, size: int) -> None:
    assert share_right(style, size, lambda image: image) >= 0.99


def test_things_on_tiles_are_read_though_other_tiles_are_near() -> None:
    """A large thing ends where a neighbour's material begins: a little is lost."""
    assert share_right("tiled", 72, lambda image: image) >= 0.93


def test_places_sizes_and_turns_are_free() -> None:
    """What is read is where it was put, on whatever ground, with hardly a pixel to spare."""
    scenes = SCENES["textured"]
    pairs = list(zip(scenes, parse_images([scene.render(48) for scene in scenes]), strict=True))
    assert all(asked.facts() == shown.facts() for asked, shown in pairs)
    things = [two for pair in pairs for two in zip(*(scene.things for scene in pair), strict=True)]
    shifts = np.array([[asked.shift, shown.shift] for asked, shown in things])
    assert np.abs(shifts[:, 0]).max() > 0.3
    assert np.abs(shifts[:, 0] - shifts[:, 1]).max() < 1.5 / 16  # cells of 16 pixels


def test_an_empty_ground_shows_nothing() -> None:
    shown = parse_images([replace(scene, things=()).render(48) for scene in SCENES["textured"]])
    assert not any(scene.things for scene in shown)


def test_what_has_the_colour_of_its_ground_is_not_seen() -> None:
    red, green, blue = (channel / 255 for channel in RGB["blue"])
    tone = (red, green, blue)
    ground = Background("flat", tone, tone, 0)
    thing = Thing("circle", "blue", "large", 1, 1)
    assert parse_image(Scene((thing,), ground).render(48)) == Scene(())
    assert (
        len(parse_image(Scene((replace(thing, colour="yellow"),), ground).render(48)).things) == 1
    )


@pytest.mark.exhaustive
def test_everything_there_is_to_draw_is_read_back() -> None:
    kinds = [(shape, None) for shape in SHAPES] + [("digit", digit) for digit in range(10)]
    scenes = [
        Scene(
            (
                Thing(shape, colour, "small", 2, 0, digit, (0.05, -0.05)),
                Thing(shape, colour, "large", 2, 2, digit, (0.05, -0.05)),
            )
        )
        for shape, digit in kinds
        for colour in COLOURS
    ]
    shown = parse_images([scene.render(48) for scene in scenes])
    assert [s.facts() for s in shown] == [s.facts() for s in scenes]
    assert all(abs(s.things[0].shift[0] - 0.05) < 0.03 for s in shown)


SPOILT: list[tuple[int, Spoil, float]] = [
    (32, noisy(0.05), 0.98),
    (48, noisy(0.1), 0.98),
    (48, blurred(1 / 32), 0.99),
    (192, blurred(1 / 16), 0.95),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("spoilt", "style"), covering(SPOILT, STYLES, strength=1))
def test_noise_and_blur_are_forgiven(spoilt: tuple[int, Spoil, float], style: Style) -> None:
    size, spoil, least = spoilt
    assert share_right(style, size, spoil) >= least


@pytest.mark.parametrize("style", STYLES)
def test_a_hopeless_blur_is_noticed(style: Style) -> None:
    assert share_right(style, 48, blurred(0.2)) < 0.6


def uniform(generator: np.random.Generator, size: int) -> np.ndarray:
    return generator.random((size, size, 3))


def normal(generator: np.random.Generator, size: int) -> np.ndarray:
    return np.clip(0.5 + 0.5 * generator.normal(size=(size, size, 3)), 0, 1)


def clouds(generator: np.random.Generator, size: int) -> np.ndarray:
    coarse = torch.from_numpy(generator.random((1, 3, 6, 6)))
    smooth = functional.interpolate(coarse, (size, size), mode="bicubic")
    return smooth[0].permute(1, 2, 0).clamp(0, 1).numpy()


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [32, 192])
@pytest.mark.parametrize("make", [uniform, normal, clouds])
def test_nothing_is_seen_in_noise(make: Callable[..., np.ndarray], size: int) -> None:
    generator = np.random.default_rng(1)
    shown = parse_images([make(generator, size) for _ in range(8)])
    assert sum(len(scene.things) for scene in shown) == 0


@pytest.mark.parametrize("level", [0.0, 0.5, 1.0])
def test_nothing_is_seen_on_a_plain_canvas(level: float) -> None:
    assert parse_image(np.full((48, 48, 3), level)) == Scene(())


def test_bytes_floats_and_images_are_one_picture() -> None:
    image = SCENES["plain"][3].render(48)
    array = np.asarray(image)
    assert parse_image(image) == parse_image(array) == parse_image(array / 255)
    assert parse_images([]) == []


@pytest.mark.parametrize("shape", [(48, 40, 3), (48, 48), (3, 48, 48)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_image(np.zeros(shape))


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
