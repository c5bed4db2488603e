from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmspec.zoo import bundled_scene
from mmspec.zoo.backgrounds import MATERIALS, Background, Tiles
from mmspec.zoo.drawing import PAPER, RGB
from mmspec.zoo.scene import BUNDLED, COLOURS, SHAPES, Scene, Thing, sample


def test_a_seed_names_one_scene_and_one_picture() -> None:
    assert sample(7) == sample(7)
    assert sample(7) != sample(8)
    assert np.array_equal(np.asarray(sample(7).render(48)), np.asarray(sample(7).render(48)))


@pytest.mark.parametrize("seed", range(30))
def test_scenes_keep_their_promises(seed: Any) -> None:
    things = sample(seed).things
    assert 1 <= len(things) <= 4
    assert list(things) == sorted(things, key=lambda t: (t.row, t.column))
    assert len({t.place for t in things}) == len(things)
    assert len({(t.colour, t.name) for t in things}) == len(things)


@pytest.mark.parametrize("seed", range(30))
def test_textured_scenes_have_the_same_facts_and_keep_their_distance(seed: int) -> None:
    scene = sample(seed, "textured")
    assert scene.facts() == sample(seed).facts()
    assert scene == sample(seed, "textured")
    for thing in scene.things:
        x, y = (
            at + 0.5 + by for at, by in zip((thing.column, thing.row), thing.shift, strict=True)
        )
        assert all(thing.radius < at < 3 - thing.radius for at in (x, y))
    assert isinstance(scene.ground, Background)
    tones = np.array([scene.ground.dark, scene.ground.light])
    inks = np.array([RGB[thing.colour] for thing in scene.things]) / 255
    assert np.linalg.norm(tones[:, None] - inks, axis=-1).min() > 0.4


@pytest.mark.parametrize("material", MATERIALS)
def test_no_material_leaves_a_blank_place(material: str) -> None:
    """One tone of a flat ground varies with the light alone; the others all vary within a cell."""
    ground = Background(material, (0.2, 0.2, 0.2), (0.8, 0.8, 0.8), 7)
    assert np.array_equal(np.asarray(ground.paint(48)), np.asarray(ground.paint(48)))
    pixels = np.asarray(ground.paint(48)).astype(float)
    cells = pixels.reshape(3, 16, 3, 16, 3).transpose(0, 2, 1, 3, 4).reshape(9, -1)
    assert cells.std(1).min() > 10


@pytest.mark.parametrize("seed", range(6))
def test_tiled_scenes_are_plain_ones_on_tiles(seed: int) -> None:
    """The same things at the same places, a material in every other, and no two tiles alike."""
    scene = sample(seed, "tiled")
    assert scene.things == sample(seed).things
    assert scene == sample(seed, "tiled")
    assert isinstance(scene.ground, Tiles)
    taken = {3 * thing.row + thing.column for thing in scene.things}
    flat = {place for place, one in enumerate(scene.ground.backgrounds) if one.material == "flat"}
    assert flat == taken
    tiles = np.asarray(replace(scene, things=()).render(72)).astype(float)
    cells = tiles.reshape(3, 24, 3, 24, 3)[:, 4:20, :, 4:20]  # away from the seams
    cells = cells.transpose(0, 2, 1, 3, 4).reshape(9, -1, 3)
    spread = cells.std(1).max(-1)
    assert all((spread[place] < 1) == (place in flat) for place in range(9))
    means = cells.mean(1)
    assert np.linalg.norm(means[:, None] - means, axis=-1)[~np.eye(9, dtype=bool)].min() > 0.5


@pytest.mark.parametrize("side", [48, 64, 100])
def test_tiles_fill_pictures_of_any_side(side: int) -> None:
    scene = replace(sample(0, "tiled"), things=())
    picture = np.asarray(scene.render(side)).astype(int)
    assert picture.shape == (side, side, 3)
    assert (picture.sum(-1) > 60).all()  # no black gap between tiles


def test_all_materials_come_up() -> None:
    grounds = [sample(seed, "textured").ground for seed in range(60)]
    assert {ground.material for ground in grounds if isinstance(ground, Background)} == {*MATERIALS}


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("shape", [*SHAPES, *range(10)])
def test_a_thing_is_drawn_in_its_colour_inside_its_cell(shape: Any, colour: Any) -> None:
    digit = shape if isinstance(shape, int) else None
    thing = Thing("digit" if digit is not None else shape, colour, "large", 1, 2, digit)
    picture = np.asarray(Scene((thing,)).render(96)).astype(int)
    is_ink = np.abs(picture - np.array(RGB[colour])).sum(-1) < 12
    rows, columns = np.nonzero(is_ink)
    assert len(rows) > 20
    assert rows.min() >= 32
    assert rows.max() < 64
    assert columns.min() >= 64
    assert tuple(picture[0, 0]) == PAPER


def test_no_two_names_look_alike() -> Any:
    def look(shape: Any, digit: Any) -> Any:
        thing = Thing(shape, "black", "small", 0, 0, digit)
        return np.asarray(Scene((thing,)).render(48)).astype(int)

    looks = [look(s, None) for s in SHAPES] + [look("digit", d) for d in range(10)]
    for i, one in enumerate(looks):
        for other in looks[:i]:
            assert np.abs(one - other).max() > 60


def test_held_out_scenes_are_about_one_in_eight() -> None:
    held_out = [sample(seed).split == "held-out" for seed in range(2000)]
    assert 0.09 < np.mean(held_out) < 0.16  # five standard deviations on either side


def test_the_bundled_image_is_the_bundled_scene() -> None:
    with Image.open(bundled_scene()) as image:
        shipped = np.asarray(image.convert("RGB")).astype(int)
    assert shipped.shape == (256, 256, 3)
    assert np.abs(shipped - np.asarray(BUNDLED.render(256)).astype(int)).mean() < 1
    assert BUNDLED.split == "held-out"
