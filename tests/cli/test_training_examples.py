"""Batches of training examples; those with cached features need no image and no target."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from mmspec import recipes, registry, zoo
from mmspec.cli.training_examples import TrainingExamples
from mmspec.training.conversations import read_questions
from mmspec.training.feature_cache import FeatureCache
from mmspec.training.feature_size import required_features
from mmspec.training.head_trainer import HeadTrainer, TrainingSettings
from mmspec.training.processes import Processes
from mmspec.training.responses import Response
from mmspec.zoo.scene import sample
from mmspec.zoo.scene_tensors import render_pixels


@pytest.fixture
def teacher() -> Any:
    owner = registry.find_modality("zoo:llava")
    return registry.training_data(owner).teacher("zoo:llava", zoo.load("llava"))


def losses(teacher: Any, folder: Path, cache: FeatureCache | None, fill: bool) -> list[float]:
    """Of two epochs."""
    questions = read_questions(folder / "asked.jsonl")
    answers = []
    for number, one in enumerate(questions):
        media = teacher.load_media(one)
        size = int(teacher.inputs([one], [media])["attention_mask"].sum())
        answers.append(Response(number, size, tuple(teacher.tokens(f"it is a {one.place[-1]}."))))
    examples = TrainingExamples(teacher, questions, answers, 2, 0, cache)
    training = recipes.get("eagle-3").training
    assert training is not None
    torch.manual_seed(0)
    head = training.begin(teacher.reader, examples.counts())
    trainer = HeadTrainer(training, teacher.reader, head, TrainingSettings(8, 1e-3))
    if fill:
        tap = required_features(training, teacher.reader, head)
        examples.cache_features(tap, 8, Processes(), lambda *_: None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(teacher), "load_media", None)
            patch.setattr(type(teacher.reader), "prefill", None)
            return [trainer.step([partial(examples.at, number)]) for number in range(8)]
    return [trainer.step([partial(examples.at, number)]) for number in range(8)]


def test_cached_rows_need_no_image_and_no_target(teacher: Any, tmp_path: Path) -> None:
    """Losses are those that the target and the images give."""
    rows: list[Any] = [{"prompt": f"is it {n * '1'} red?"} for n in range(3)]
    for number in range(4):
        Image.fromarray(render_pixels(sample(number))).save(tmp_path / f"{number}.png")
        rows.append({"prompt": f"what is {number}?", "image": f"{number}.png"})
    (tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, rows)))
    expected = losses(teacher, tmp_path, None, False)
    own = {"data": "d"}
    found = losses(teacher, tmp_path, FeatureCache(tmp_path / "cache", own, None), True)
    assert found == pytest.approx(expected, rel=1e-3)
    assert losses(teacher, tmp_path, FeatureCache(tmp_path / "cache", own, None), True) == found
    empty = FeatureCache(tmp_path / "other", own, None)
    assert empty.prompt_ids([0]) is None
