"""On a GPU every recipe of the bundled models gives what it gives on a CPU, in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from mmspec import recipes
from mmspec.cli.app import app

SOUND = str(Path(__file__).parents[1] / "mmspec" / "zoo" / "recordings" / "held-out-06.wav")
CALLS: dict[str, list[str]] = {
    "llava-chat": ["--image", "zoo:scene", "--prompt", "describe the picture"],
    "whisper": ["--audio", SOUND],
    "codec-lm": ["--prompt", "a red circle"],
    "vla": ["--steps", "8"],
    "image": ["--prompt", "a red circle"],
    "mar": ["--prompt", "1", "--last-noise"],
    "diffusion": ["--prompt", "a red circle", "--steps", "40"],
}
FILES = {"codec-lm": "out.wav", "vla": "out.gif"}
ROUNDING = 0.01  # of 255 levels: the mean over a picture


def generate(model: str, recipe: str, device: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    """What the command wrote, and its statistics. Raises ValueError if the recipe does not fit."""
    out = folder / FILES.get(model, "out.png")
    where = [] if model in ("llava-chat", "whisper") else ["--out", str(out)]
    call = ["generate", "--model", f"zoo:{model}", "--recipe", recipe, "--device", device]
    done = CliRunner().invoke(app, [*call, "--no-compare", "--json", *CALLS[model], *where])
    if done.exit_code:
        raise done.exception or ValueError(done.output)
    made = json.loads(done.stdout)
    found = made.get("tokens") or made.get("codes") or made.get("actions") or made.get("text")
    if found is None:
        found = np.asarray(Image.open(out).convert("RGB"), dtype=float)
    return found, made["stats"]


def is_same(here: Any, there: Any) -> bool:
    if isinstance(here, np.ndarray):
        return float(np.abs(here - there).mean()) < ROUNDING
    return bool(here == there)


def compare(model: str, recipe: str, device: str, folder: Path) -> str:
    """What differs on a device; empty = nothing, or a recipe that does not fit on a CPU either."""
    try:
        here, stats = generate(model, recipe, "cpu", folder)
    except (ValueError, SystemExit):
        return ""
    there, found = generate(model, recipe, device, folder)
    if found["fallback"] != stats["fallback"]:
        return f"fallback: {found['fallback']}"
    return "" if is_same(here, there) or not stats["exact"] else "another output"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("model", CALLS)
def test_recipes_give_what_they_give_on_a_cpu(model: str, tmp_path: Path) -> None:
    """Lossy ones run; their drafts may round otherwise at a threshold."""
    found = {name: compare(model, name, "cuda", tmp_path) for name in recipes.names()}
    assert not {name: what for name, what in found.items() if what}


def test_a_difference_is_seen(tmp_path: Path) -> None:
    """Another output, and one that was not drafted."""
    here, _ = generate("llava-chat", "eagle-3", "cpu", tmp_path)
    assert is_same(here, [*here])
    assert not is_same(here, [*here[:-1], 0])
    picture = np.zeros((4, 4, 3))
    assert is_same(picture, picture + ROUNDING / 2)
    assert not is_same(picture, picture + 1)
    assert compare("llava-chat", "spec-vla", "cpu", tmp_path) == ""
    assert compare("llava-chat", "eagle-3", "cpu", tmp_path) == ""
