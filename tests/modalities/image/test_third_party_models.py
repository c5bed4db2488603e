"""An image model of another package, registered by its entry point."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mmspec
from mmspec import registry
from mmspec.modalities.image import families, llamagen
from mmspec.models.llamagen import LlamaGenConfig, LlamaGenForImageGeneration
from tests.toys import image_models


class StrangeConfig(LlamaGenConfig):
    model_type = "strange_painter"


class StrangePainter(LlamaGenForImageGeneration):
    """LlamaGen under an unknown model type."""

    config_class = StrangeConfig


DRAWING = families.DrawingModel(llamagen.FAMILY, llamagen.reader, StrangePainter)


def painter() -> Any:
    known = image_models.llamagen_class()
    settings = known.config.to_dict()
    del settings["model_type"]
    strange: Any = StrangePainter(StrangeConfig(**settings))
    strange.load_state_dict(known.state_dict())
    strange.set_attn_implementation("sdpa")
    return strange.eval()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "strange_painter-0.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: strange-painter\nVersion: 0.1\n")
    point = f"strange_painter = {__name__}:DRAWING"
    (folder / "entry_points.txt").write_text(f"[mmspec.drawing_models]\n{point}\n")
    monkeypatch.syspath_prepend(tmp_path)
    families.image_models.cache_clear()
    yield
    families.image_models.cache_clear()


def test_it_generates_with_any_recipe(installed: None, tmp_path: Path) -> None:
    model = painter()
    assert registry.find_modality(model).name == "image"
    given = {"class_ids": [1, 3], "temperature": 1.0, "seed": 2}
    fast = mmspec.accelerate(model, "mc-sjd-gumbel")
    known = mmspec.accelerate(image_models.llamagen_class(), "mc-sjd-gumbel")
    wanted = known.generate_images(**given)
    assert torch.equal(fast.generate_images(**given).sequences, wanted.sequences)
    model.save_pretrained(tmp_path / "model")
    assert registry.find_modality(tmp_path / "model").name == "image"
    again = registry.plug(registry.get("image")).load(tmp_path / "model")
    assert isinstance(again, StrangePainter)


def test_without_its_entry_point_the_model_is_refused() -> None:
    families.image_models.cache_clear()
    with pytest.raises(ValueError, match=r"\(strange_painter\) generates no image tokens; .*emu3"):
        families.image_family(painter())
