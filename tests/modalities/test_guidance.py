"""Guidance of real pipelines: taken over as it is, or refused, and never guessed from one draw.

One picture is the dangerous case: a rule that depends on what the branches are, such as a norm, is
then a single number per step, which fits any one draw.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmspec
from mmspec.modalities.diffusion.guidance_fit import Fitter
from tests.modalities.sampling import PLAIN, STEPS, alone, draw, shared
from tests.toys.embedded_pipelines import embedded


@pytest.mark.parametrize("share", [0.7, 1.0])
@pytest.mark.parametrize("name", ["sd", "sdxl"])
def test_rescaled_guidance_of_one_picture_is_not_frozen(
    name: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = shared(name)

    def call(one: Any, generator: torch.Generator) -> torch.Tensor:
        return draw(one, name, 1, generator=generator, guidance_rescale=share)

    expected = alone(pipe, 1, monkeypatch, lambda generator: call(pipe, generator))
    found = call(mmspec.accelerate(pipe, PLAIN), torch.Generator().manual_seed(5))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("cogvideo", {"use_dynamic_cfg": True}),  # other weights in every step: two rehearsals
        ("cogvideo", {}),
        ("hunyuan-image", {"num_inference_steps": 2}),  # before its guider begins to project
        ("lumina-2", {"cfg_normalization": False}),
    ],
)
def test_fixed_weights_are_the_pipelines_own(
    name: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the state of the generator on: a second rehearsal must not draw from it again."""
    pipe, given = embedded(name)
    given = {"num_inference_steps": STEPS, **given, **more}
    expected = alone(pipe, 1, monkeypatch, lambda one: pipe(generator=one, **given)[0])
    fast: Any = mmspec.accelerate(pipe, PLAIN)
    found = fast(generator=torch.Generator().manual_seed(5), **given)[0]
    scale = expected.std().item()
    torch.testing.assert_close(found, expected, atol=1e-4 * scale, rtol=1e-4)
    assert fast.last_stats.target_calls == given["num_inference_steps"]


@pytest.mark.parametrize(
    ("name", "more", "cause"),
    [
        ("qwen-image", {}, r"switch off true_cfg_scale=4\.0"),
        ("qwen-image", {"height": 64, "width": 64}, r"switch off true_cfg_scale=4\.0"),
        ("hunyuan-image", {}, r"switch off pipe\.guider"),
        ("lumina-2", {}, "switch off cfg_normalization=True"),
        ("prx-pixel", {}, "none of the known"),  # its scheduler is given (state - output) / t
        ("prx-pixel", {"guidance_scale": 1.0}, "none of the known"),
    ],
)
def test_guidance_that_depends_on_its_branches_is_refused(
    name: str, more: dict[str, Any], cause: str
) -> None:
    pipe, given = embedded(name)
    with pytest.raises(ValueError, match=rf"rule that is.*{cause}.*speca or taylorseer"):
        mmspec.accelerate(pipe, PLAIN)(num_inference_steps=STEPS, **{**given, **more})


def test_a_ratio_that_fits_one_draw_does_not_fit_two() -> None:
    """A norm of one picture, in steps whose other weights are a schedule."""
    fitter = Fitter({"cfg_normalization": True})
    for step in range(3):
        negative, positive = torch.randn(2, 1, 4, 8, 8)
        guided = negative + (step + 1) * (positive - negative)
        fitter.add(step, [negative, positive], guided * positive.norm() / guided.norm())
    assert not fitter.is_sure
    with pytest.raises(ValueError, match="another one for other outputs of the same step"):
        negative, positive = torch.randn(2, 1, 4, 8, 8)
        guided = negative + positive - negative / 2
        fitter.add(0, [negative, positive], guided * positive.norm() / guided.norm())
