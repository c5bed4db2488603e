"""The memory that weights take, before they are read, and what is free."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mmspec import zoo
from mmspec.models import footprint
from mmspec.models.footprint import check_memory, format_bytes, free_bytes, hub_bytes, weight_bytes
from mmspec.models.placement import Placement

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl-drafter", "mar"])
def test_the_bytes_are_those_of_the_loaded_model(name: str, dtype: str) -> None:
    model = zoo.load(name, getattr(torch, dtype))
    loaded = sum(one.numel() * one.element_size() for one in model.state_dict().values())
    found = weight_bytes(zoo.path(name), Placement(dtype=dtype))
    assert found == pytest.approx(loaded, rel=0.1)


def test_pipelines_are_the_sum_of_their_parts() -> None:
    pipe = zoo.load("diffusion")
    parts = (pipe.text_encoder, pipe.vae, pipe.transformer)
    loaded = sum(one.numel() * 4 for part in parts for one in part.parameters())
    assert weight_bytes(zoo.path("diffusion"), Placement(), torch.float32) == pytest.approx(
        loaded, rel=0.05
    )


def test_weights_as_saved_take_their_size_on_disk() -> None:
    folder = zoo.path("whisper")
    found = weight_bytes(folder, Placement())
    assert found == (folder / "model.safetensors").stat().st_size


def test_what_does_not_fit_is_refused_with_both_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "free_bytes", lambda device: 3 << 30)
    check_memory({"big": 3 << 30}, CPU)
    with pytest.raises(ValueError, match=r"big \(3 GiB\) and small \(1 GiB\) need 4 GiB .*3 GiB f"):
        check_memory({"big": 3 << 30, "small": 1 << 30}, CPU)
    monkeypatch.setattr(footprint, "free_bytes", lambda device: None)
    check_memory({"big": 1 << 60}, CPU)  # unknown: not refused


def test_a_container_may_have_less_than_its_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(footprint, "CGROUP", tmp_path)
    monkeypatch.setattr(footprint, "MEMINFO", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:    4000 kB\n")
    assert free_bytes(CPU) == 4000 << 10
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert free_bytes(CPU) == 4000 << 10
    (tmp_path / "memory.max").write_text("5000\n")
    assert free_bytes(CPU) == 4000
    (tmp_path / "memory.stat").write_text("inactive_file 500\n")
    assert free_bytes(CPU) == 4500


def test_models_of_the_hub_are_measured_there(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"BF16": 1000, "F32": 10, "F8_E4M3": 8}
    known = SimpleNamespace(parameter_count=counts)
    monkeypatch.setattr("huggingface_hub.get_safetensors_metadata", lambda name: known)
    assert hub_bytes("a/b", Placement()) == 2048
    assert hub_bytes("a/b", Placement(dtype="float32")) == 4 * 1018

    def fail(name: str) -> None:
        raise OSError

    monkeypatch.setattr("huggingface_hub.get_safetensors_metadata", fail)
    assert hub_bytes("a/b", Placement()) is None


def test_sizes_have_units() -> None:
    assert format_bytes(3 << 30) == "3 GiB"
    assert format_bytes(5 << 20) == "5 MiB"
