"""Pipelines with quantized denoising networks, loaded or quantized in place."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mmspec.modalities.diffusion import plug
from mmspec.models.footprint import weight_bytes
from mmspec.models.placement import Placement
from mmspec.models.quantized_pipelines import find_denoisers
from tests.toys.pipelines import pipeline

NEEDS_TORCHAO = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")


def list_weights(network: nn.Module) -> set[type]:
    return {type(one.weight) for one in network.modules() if isinstance(one, nn.Linear)}


def test_denoisers_are_the_networks_of_steps() -> None:
    parts = ("unet", "text_encoder", "transformer_2", "vae", "transformer", "transformers")
    assert find_denoisers(parts) == ["unet", "transformer_2", "transformer"]


@pytest.mark.skipif(find_spec("torchao") is not None, reason="torchao is there")
def test_without_torchao_the_error_names_the_extra() -> None:
    with pytest.raises(ValueError, match=r"quantize='int8' needs torchao; install mmspec\[quant"):
        Placement(quantize="int8")


def test_only_networks_are_counted_as_quantized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmspec.models.placement.find_spec", lambda name: name)
    pipeline("pixart").save_pretrained(tmp_path)
    placements = (Placement(), Placement(quantize="int8"))
    whole, network, text = (
        [weight_bytes(folder, one) for one in placements]
        for folder in (tmp_path, tmp_path / "transformer", tmp_path / "text_encoder")
    )
    assert text[1] < text[0]  # it would be smaller
    assert whole[0] - whole[1] == network[0] - network[1] > 0


@pytest.mark.exhaustive
@NEEDS_TORCHAO
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_a_bundled_pipeline_is_that_of_its_folder(bits: str) -> None:
    from mmspec import zoo

    placement = Placement(quantize=bits)
    own = plug.load("zoo:diffusion", placement=placement)
    assert nn.Parameter not in list_weights(own.transformer)
    assert list_weights(own.text_encoder) == {nn.Parameter}
    other = plug.load(zoo.path("diffusion"), placement=placement)
    for one in (own, other):
        one.set_progress_bar_config(disable=True)
    request: dict[str, Any] = {"prompt": "a red circle", "num_inference_steps": 2}
    request |= {"output_type": "latent", "use_resolution_binning": False, "clean_caption": False}
    latents = [
        one(**request, generator=torch.Generator().manual_seed(0)).images for one in (own, other)
    ]
    assert torch.equal(*latents)
    plain = zoo.load("diffusion")
    plain.set_progress_bar_config(disable=True)
    assert not torch.equal(
        latents[0], plain(**request, generator=torch.Generator().manual_seed(0)).images
    )


@pytest.mark.exhaustive
@NEEDS_TORCHAO
def test_widths_that_do_not_fit_are_refused_with_the_fix(tmp_path: Path) -> None:
    pipeline("sd").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"quantize='int4' is refused .*multiples of 32"):
        plug.load(tmp_path, placement=Placement(quantize="int4"))


def test_other_quantizers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmspec.models.placement._check_quantizer", lambda name, device: None)
    with pytest.raises(ValueError, match=r"'bnb-nf4' is not supported for pipelines.*int8 or int4"):
        plug.load("zoo:diffusion", placement=Placement(quantize="bnb-nf4"))
