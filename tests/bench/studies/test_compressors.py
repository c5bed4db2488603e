"""The catalogue of compressors: what each keeps, in one race, and what does not go with a pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import mmspec
from mmspec.bench.plots import plot_compressors
from mmspec.bench.studies.compressors import (
    Catalogue,
    catalogue,
    default_compressors,
    drafter_kv_bytes,
)
from mmspec.bench.studies.kept_tokens import DROPPED, KEPT, MERGED, draw
from mmspec.compressors import COMPRESSORS
from mmspec.modalities.common.measures import request_workload
from tests import toys
from tests.cli.running import fail
from tests.partners import noisy

SHARES = {"none": 1.0, "identity": 1.0, "average-pool": 0.25, "hide-all": 0.0}


def measured(*compressors: str, filmed: bool = False) -> Catalogue:
    model, small = toys.model("qwen2_5_vl"), noisy("qwen2_5_vl")
    request: dict[str, Any] = toys.with_video("qwen2_5_vl") if filmed else toys.inputs("qwen2_5_vl")
    work = request_workload(model, [{**request, "max_new_tokens": 6, "do_sample": False}])

    def accelerated(recipe: str, **parts: Any) -> mmspec.Accelerated:
        return mmspec.accelerate(model, recipe, drafter=small, **parts)

    how: dict[str, Any] = {"recipe": "coupled", "repeats": 1}
    return catalogue(accelerated, work, compressors=compressors, **how)


def test_every_point_reports_the_kept_share() -> None:
    found = measured("identity", "average-pool:stride=2", "hide-all", "cls-topk", filmed=True)
    shares = {one.compressor.partition(":")[0]: one.kept for one in found.points}
    assert shares == pytest.approx(SHARES)
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    assert all(one.prefill_ms > 0 and one.row.identical == 1 for one in found.points)
    assert list(found.left_out) == ["cls-topk"]
    assert "gives no class token" in found.left_out["cls-topk"]


def test_the_draft_model_remembers_in_proportion_to_what_is_kept() -> None:
    """A prompt of 24 visual tokens: a quarter of them is a quarter of their keys and values."""
    quarter = ("average-pool:stride=2", "attn-topk:keep=0.25")
    found = measured(*quarter, "hide-all", filmed=True)
    held = {one.compressor: one.kv_bytes for one in found.points}
    text, whole = held.pop("hide-all"), held.pop("none")
    assert whole is not None
    assert text is not None
    config = noisy("qwen2_5_vl").config.text_config
    width = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    assert whole - text == 24 * config.num_hidden_layers * 2 * width * 4  # float32
    assert {one.kept for one in found.points if one.compressor in quarter} == {0.25}
    assert [held[name] for name in quarter] == [text + (whole - text) // 4] * 2


def test_who_does_not_say_what_it_keeps_has_no_figure() -> None:
    model = toys.model("qwen2_5_vl")
    request = {**toys.inputs("qwen2_5_vl"), "max_new_tokens": 4, "do_sample": False}
    fast = mmspec.accelerate(model, "prompt-lookup")
    assert drafter_kv_bytes(fast, request_workload(model, [request]), 0) is None


def test_all_without_weights_take_part() -> None:
    assert {"resampler", "conv", "elastic-gate"} <= {*COMPRESSORS} - {*default_compressors()}
    assert {"holistic", "uv-prune", "top-p-uniform"} <= {*default_compressors()}


@pytest.mark.exhaustive
def test_points_are_written_and_drawn(tmp_path: Path) -> None:
    found = measured("average-pool")
    found.write_csv(tmp_path / "points.csv")
    lines = (tmp_path / "points.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["compressor", "none", "average-pool"]
    pytest.importorskip("matplotlib", reason="mmspec[plots] is not installed")
    plot_compressors(found, tmp_path / "points.svg")
    assert "average-pool" in (tmp_path / "points.svg").read_text()


def test_what_is_kept_is_drawn_over_frames(tmp_path: Path) -> None:
    found = measured("average-pool", "hide-all", "bipartite-merge:keep=0.5", filmed=True)
    lines = {one.compressor: one.first for one in found.points if one.first is not None}
    assert {one.shape for one in lines.values()} == {(6, 2, 2)}
    merged = lines["bipartite-merge:keep=0.5"]
    assert (merged.kept, sum(merged.sizes)) == (12, 24)
    assert lines["hide-all"].kept == 0
    assert all(
        sum(size > 0 for size in lines["average-pool"].sizes[at : at + 4]) == 1
        for at in range(0, 24, 4)
    )
    draw(lines, tmp_path / "kept.png")
    picture = Image.open(tmp_path / "kept.png")
    colours: set[Any] = {colour for _, colour in picture.getcolors(10_000) or ()}
    assert {DROPPED, KEPT, (255, 255, 255)} < colours
    assert any(KEPT[0] < red <= MERGED[0] for red, _, _ in colours - {(255, 255, 255)})
    with pytest.raises(ValueError, match="nothing to draw"):
        draw({}, tmp_path / "none.png")


def test_unknown_names_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    _, line = fail(capsys, "bench", "compressors", "--only", "average-pol", "--prompts", "1")
    assert "did you mean 'average-pool'" in line
