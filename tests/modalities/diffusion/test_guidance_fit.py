"""Guidance rules identified from a pipeline."""

from __future__ import annotations

import pytest
import torch

from mmspec.modalities.diffusion.guidance_fit import (
    GuidanceFitter,
    RescaledGuidance,
    WeightedGuidance,
)


def test_weights_of_guidance_are_read_off_every_step() -> None:
    fitter = GuidanceFitter({})
    for run in range(2):
        for step, scale in enumerate((1.0, 3.25, 7.5)):
            negative, positive = torch.randn(2, 2, 6, 4, 4)
            guided = negative + scale * (positive - negative)
            fitter.add(step, [negative, positive], guided[:, :3])
        assert fitter.is_sure is (run == 1)
    join = fitter.build_guidance(3)
    assert isinstance(join, WeightedGuidance)
    assert join.size == 3
    assert join.weights[:, 1].tolist() == [1.0, 3.25, 7.5]
    negative, positive = torch.randn(2, 3, 6, 4, 4)
    scales = torch.tensor([7.5, 1.0, 3.25]).reshape(3, 1, 1, 1)
    expected = negative + scales * (positive - negative)
    found = join([negative, positive], torch.tensor([2, 0, 1]))
    torch.testing.assert_close(found, expected[:, :3])


def test_equal_weights_in_two_steps_are_sure() -> None:
    fitter = GuidanceFitter({})
    for step in range(2):
        assert not fitter.weights or not fitter.is_sure
        negative, positive = torch.randn(2, 2, 6, 4, 4)
        fitter.add(step, [negative, positive], 3 * positive - 2 * negative)
    assert fitter.is_sure


def test_guidance_that_is_not_known_is_refused() -> None:
    negative, positive = torch.randn(2, 2, 4, 8, 8)
    with pytest.raises(ValueError, match="rule that is not supported"):
        GuidanceFitter({"guidance_scale": 2.0}).add(0, [negative, positive], negative * positive)
    fitter = GuidanceFitter({"guidance_scale": 2.0, "guidance_rescale": 0.5})
    rescaled = RescaledGuidance(2.0, 0.5)([negative, positive], torch.zeros(2))
    fitter.add(0, [positive, negative], rescaled)
    assert fitter.is_sure
    assert fitter.build_guidance(3) == RescaledGuidance(2.0, 0.5, 1, 0)
    with pytest.raises(ValueError, match=r"guidance_rescale, and.*guidance_rescale=0\.5"):
        fitter.add(1, [positive, negative], negative + 2 * (positive - negative))


def test_a_norm_that_is_only_limited_is_refused_for_every_draw() -> None:
    """LongCat's guidance has the norm of the positive branch if that is the smaller one."""
    negative, positive = torch.randn(2, 2, 4, 8)
    guided = negative + 4 * (positive - negative)
    raw = guided * positive.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)
    given: dict[str, object] = {"guidance_scale": 4.0}
    GuidanceFitter(given).add(0, [negative, positive], raw)
    with pytest.raises(ValueError, match=r"limited by a norm.*switch off enable_cfg_renorm=True"):
        GuidanceFitter({**given, "enable_cfg_renorm": True}).add(0, [negative, positive], raw)
    GuidanceFitter({**given, "cfg_normalization": True}).add(
        0, [negative, positive], raw
    )  # Lumina 2's
    with pytest.raises(ValueError, match="limited by a norm"):
        GuidanceFitter({**given, "cfg_normalization": 2.0}).add(0, [negative, positive], guided)
    GuidanceFitter({"cfg_normalization": True}).add(0, [positive], positive)  # nothing to limit
