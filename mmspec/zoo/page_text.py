"""The text that a classical parser makes of an image: the draft of recipe `hsd` for bundled models.

    read_picture(image, known=0.8)    # "the large red circle is in the center. the small ..."

In place of a layout and OCR pipeline of documents: things are found by template matching
(`mmspec.zoo.scene_parser`), without any language model. It knows what is in the image, and neither
the question nor the wording of an answer.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from mmspec.errors import check_number
from mmspec.zoo.captions import AT, format_thing
from mmspec.zoo.language import spell
from mmspec.zoo.scene_parser import parse_image


def read_picture(image: Image.Image | np.ndarray, known: float = 1.0, seed: int = 0) -> str:
    """Return a sentence for each thing in an image, in reading order.

    A share `known` of the things is read on average, selected by `seed`. Raises ValueError for a
    share outside [0, 1].
    """
    check_number("known", known, 0, 1)
    generator = np.random.default_rng((seed, 13))
    things = sorted(parse_image(image).things, key=lambda one: (one.row, one.column))
    kept = [one for one in things if generator.random() < known]
    return spell(" ".join(f"the {format_thing(one)} is {AT[one.place]}." for one in kept))
