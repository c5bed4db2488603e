"""Phrases are those of the rows that the model draws."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import mmspec
from mmspec.codes.phrases import Phrases
from mmspec.training.phrases import learn_phrases
from tests.toys import image_models

HOW = {"guidance": 2.0, "temperature": 0.7}


def test_they_are_merged_from_the_rows_of_drawn_grids(tmp_path: Path) -> None:
    """Drawn again by hand with the seeds, and by an exact recipe that keeps them."""
    model, stages = image_models.llamagen_class(), list[tuple[str, int, int]]()
    asked = [{"class_ids": torch.tensor(classes)} for classes in ([0, 1, 2, 3], [4, 0, 1])]
    plain = mmspec.accelerate(model, "plain")

    def report(stage: str, done: int, total: int) -> None:
        stages.append((stage, done, total))

    found = learn_phrases(plain, asked, HOW, merges=9, longest=3, seed=5, progress=report)
    rows = [
        row
        for index, request in enumerate(asked)
        for picture in plain.generate_images(**request, **HOW, seed=5 + index).ids.tolist()
        for row in picture
    ]
    side = image_models.SIDE
    assert (found.pictures, found.rows, found.codes) == (7, 7 * side, 7 * side**2)
    assert found.phrases == Phrases.build(rows, 9, 3)
    assert sum(found.lengths().values()) == len(found.phrases) > 0
    assert stages == [("draw", 1, 2), ("draw", 2, 2)]
    gumbel = mmspec.accelerate(model, "mc-sjd-gumbel")
    assert learn_phrases(gumbel, asked[:1], HOW, seed=5).rows == 4 * side
    file = tmp_path / "phrases.safetensors"
    found.phrases.save(file)
    joint = mmspec.accelerate(model, "sjd-pv", phrases=str(file))
    assert joint.generate_images(**asked[0], **HOW, seed=1).stats.fallback is None


def test_lossy_pictures_teach_nothing() -> None:
    relaxed = mmspec.accelerate(image_models.llamagen_class(), "zipar")
    with pytest.raises(ValueError, match="recipe 'zipar' is lossy"):
        learn_phrases(relaxed, [], {})
