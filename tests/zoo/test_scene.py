from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmspec.zoo import bundled_scene
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


def test_the_bundled_scene_is_what_it_says() -> None:
    with Image.open(bundled_scene()) as image:
        shipped = np.asarray(image.convert("RGB")).astype(int)
    assert shipped.shape == (256, 256, 3)
    assert np.abs(shipped - np.asarray(BUNDLED.render(256)).astype(int)).mean() < 1
    assert BUNDLED.split == "held-out"
