"""Where commands load their models: honoured, or refused before weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mmspec import registry, zoo
from mmspec.cli import placement
from mmspec.cli.models import load, select
from mmspec.cli.options import PLACED, PLACEMENT, ModelOptions
from mmspec.models import footprint
from tests.cli.running import fail, run
from tests.covering import limited

GENERATE = ("generate", "--no-compare", "--max-new-tokens", "4")
LLAVA = ("--model", "zoo:llava", "--image", "zoo:scene", "--prompt", "what is there")
MODELS = {  # a bundled model of every modality that has one
    one.name: f"zoo:{one.zoo[0].name}" for one in registry.modalities().values() if one.zoo
}


def load_with(model: str, **options: Any) -> Any:
    given = ModelOptions(model=model, json=True, **options)
    return load(given, select(given))


@pytest.mark.parametrize("modality", limited(MODELS, 4))
def test_every_modality_loads_in_half_precision(modality: str) -> None:
    loaded = load_with(MODELS[modality], dtype="bfloat16", device="cpu")
    for model in (loaded.model, *loaded.drafters.values()):
        assert model.dtype == torch.bfloat16
        assert model.device == torch.device("cpu")


@pytest.mark.parametrize(
    "modality", limited([one for one in MODELS if one not in ("mar", "diffusion")], 3)
)
def test_models_of_tokens_are_the_bundled_ones_however_loaded(modality: str) -> None:
    placed = load_with(MODELS[modality], attn="eager", drafter=None).model
    usual = zoo.load(MODELS[modality].removeprefix("zoo:"))
    assert type(placed) is type(usual)
    assert placed.config._attn_implementation == "eager"
    assert placed.config._name_or_path == usual.config._name_or_path
    own = placed.state_dict()
    assert all(torch.equal(one, own[name]) for name, one in usual.state_dict().items())


@pytest.mark.parametrize("modality", registry.modalities())
def test_modalities_refuse_what_they_do_not_honour(modality: str) -> None:
    owner = registry.modalities()[modality]
    assert set(owner.placement) <= set(PLACED)
    for name in set(PLACED) - set(owner.placement):
        with pytest.raises(ValueError, match=rf"--{name.replace('_', '-')}: models of modality"):
            placement.check_placement({name: "cpu"}, owner, "zoo:x")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--device", "cuda:99"), "device='cuda:99' is not available; give one of: cpu"),
        (("--dtype", "float99"), "dtype='float99' is no floating dtype"),
        (("--drafter-device", "warp"), "device='warp' is not available"),
        (("--drafter-device", "cpu", "--recipe", "prompt-lookup"), "no draft model is loaded"),
        (("--drafter-device", "cpu", "--recipe", "eagle-3"), "reads the target's states"),
    ],
)
def test_generate_refuses_before_it_loads(
    options: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "plug", lambda owner: pytest.fail("loaded"))
    monkeypatch.setattr("mmspec.cli.models.registry.plug", lambda owner: _Unloadable())
    assert message in fail(capsys, *GENERATE, *LLAVA, *options)[1]


class _Unloadable:
    def load(self, *_: Any, **__: Any) -> Any:
        pytest.fail("loaded")


def test_weights_beyond_memory_are_refused_by_every_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(footprint, "free_bytes", lambda device: 1 << 20)
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": f"what is {n}", "answer": "three"} for n in range(3)]
    data.write_text("\n".join(json.dumps(row) for row in rows))
    train = ("train", "medusa", "--target", "zoo:llava", "--data", str(data))
    for command in (
        (*GENERATE, *LLAVA),
        ("bench", "--model", "zoo:llava", "--prompts", "1"),
        ("bench", "compressors", "--model", "zoo:llava"),
        ("bench", "overlap", "--model", "zoo:llava"),
        ("certify", "coupled", "--model", "zoo:llava"),
        (*train, "--out", str(tmp_path / "head")),
    ):
        line = fail(capsys, *command)[1]
        assert "cpu has 1 MiB free" in line, command
        assert "--dtype" in line
    assert not (tmp_path / "head").exists()


def test_every_command_that_loads_has_the_options() -> None:
    from mmspec.cli.app import commands

    tree = commands().commands
    bench, train, export = (tree[name].commands for name in ("bench", "train", "export"))
    whole = [tree["generate"], tree["bench"], tree["certify"], tree["doctor"]]
    whole += [bench[name] for name in ("sweep", "overlap", "compressors")]
    whole += [train["recipe"], train["phrases"]]
    for command in whole:
        known = {option for one in command.params for option in one.opts}
        assert {f"--{name.replace('_', '-')}" for name in PLACEMENT} <= known, command.name
    assert "--dtype" in {option for one in export["head"].params for option in one.opts}


def test_doctor_reports_memory_before_loading(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run(capsys, "doctor", "zoo:llava", "zoo:llava-drafter", "--dtype", "bfloat16")
    line = next(one for one in found["findings"] if one["check"] == "weights in memory")
    assert "MiB" in line["target"]
    assert "free on cpu" in line["remark"]
    monkeypatch.setattr(footprint, "free_bytes", lambda device: 1)
    assert "for weights, and cpu has" in fail_doctor(capsys, "zoo:llava")
    assert "give one of: cpu" in fail_doctor(capsys, "zoo:llava", "--device", "cuda:99")


def fail_doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    from mmspec.cli import main

    capsys.readouterr()
    assert main(["doctor", *arguments]) == 1
    return capsys.readouterr().err


def test_exported_heads_have_the_dtype(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    head, out = str(zoo.path("llava-medusa")), tmp_path / "out"
    run(capsys, "export", "medusa", head, "--out", str(out), "--dtype", "bfloat16")
    (file,) = out.glob("*.safetensors")
    assert {one.dtype for one in load_file(file).values()} == {torch.bfloat16}
    refused = ("--out", str(tmp_path / "b"), "--dtype", "int8")
    assert "no floating dtype" in fail(capsys, "export", "medusa", head, *refused)[1]
