"""The survey of `mmspec doctor --all --modality diffusion`: a few pipelines, or all (slow)."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from mmspec.modalities.diffusion import survey
from mmspec.modalities.diffusion.tiny_pipelines import build, build_request

TABLE = Path(__file__).resolve().parents[3] / "docs" / "pipelines.md"
STEPS = {"num_inference_steps": survey.STEPS}


def test_a_pipeline_that_writes_into_its_latents_gives_its_own_clip() -> None:
    """Kandinsky 5 writes the next state over the latents that its scheduler got."""
    pipe = build("Kandinsky5T2VPipeline")
    given = {**STEPS, **build_request(pipe)}
    assert survey.CHECKS["plain"](pipe, given, survey._own(pipe, given)) == "equal"


@pytest.mark.exhaustive
def test_rows_along_another_axis_are_refused() -> None:
    """The embeddings of HiDream's language model are stacked by layer, then by row."""
    pipe = build("HiDreamImagePipeline")
    given = {**STEPS, **build_request(pipe)}
    for use in ("plain", "windows", "exact"):
        with pytest.raises(ValueError, match=r"pipe\.transformer does not accept other states"):
            survey.CHECKS[use](pipe, given, torch.zeros(1))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "use", "match"),
    [
        ("AnyFlowFARPipeline", "forecast", "parts of different lengths"),
        ("SkyReelsV2DiffusionForcingPipeline", "exact", "copies its scheduler"),
        ("ZImagePipeline", "cache", "does not support ZImageTransformer2DModel as this pipeline"),
    ],
)
def test_what_cannot_be_right_is_refused_in_one_error(name: str, use: str, match: str) -> None:
    if name != "ZImagePipeline":
        pytest.importorskip("ftfy")
    pipe = build(name)
    with pytest.raises(ValueError, match=match):
        survey.CHECKS[use](pipe, {**STEPS, **build_request(pipe)}, torch.zeros(1))


@pytest.mark.exhaustive
def test_other_noise_is_reported_as_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check would see latents that are not the pipeline's: here noise that is not replayed."""
    pipe = build("HunyuanDiTPipeline")
    given: dict[str, Any] = {**STEPS, **build_request(pipe)}
    assert survey.CHECKS["plain"](pipe, given, survey._own(pipe, given)) == "equal"
    monkeypatch.setattr(survey, "replay_noise", lambda *_: nullcontext())
    assert survey.CHECKS["plain"](pipe, given, survey._own(pipe, given)) == "wrong"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["FluxPipeline", "WanPipeline", "SanaPAGPipeline", "IFPipeline"])
def test_a_pipeline_has_the_line_of_the_table(name: str) -> None:
    if name == "WanPipeline":
        pytest.importorskip("ftfy")
    line = survey.measure_pipeline(name)
    assert rows(survey.markdown([line]))[0] in rows(TABLE.read_text())


@pytest.mark.slow
def test_the_table_is_what_is_measured() -> None:
    """Pipelines whose libraries are missing here are left out."""
    lines = list(survey.survey())
    assert not [line.name for line in lines if line.verdict in ("wrong", "crash")]
    measured, told = (rows(text) for text in (survey.markdown(lines), TABLE.read_text()))
    assert len(measured) > 50
    assert not [row for row in measured if row not in told]


def rows(text: str) -> list[list[str]]:
    """Pipeline, sampler, verdict and outcomes of a table."""
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [line[:-1] for line in lines[2:]]
