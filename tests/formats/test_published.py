"""Files of weights: what they nest, what they are wrapped in, and code that must not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mmspec import formats
from mmspec.formats.published import read_weights

ONE = {"a.weight": torch.arange(3.0)}


class Hostile:
    """Writes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


@pytest.mark.parametrize(
    "content",
    [
        ONE,
        {"model": ONE, "step": 3},
        {"module": {f"module.{name}": value for name, value in ONE.items()}},
        {"state_dict": {f"_orig_mod.{name}": value for name, value in ONE.items()}},
    ],
)
def test_weights_are_found_under_their_names(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "x.pt")
    found = read_weights(tmp_path / "x.pt")
    assert found.keys() == ONE.keys()
    assert torch.equal(found["a.weight"], ONE["a.weight"])


def test_safetensors_need_no_pickle(tmp_path: Path) -> None:
    save_file(ONE, tmp_path / "x.safetensors")
    assert read_weights(tmp_path / "x.safetensors").keys() == ONE.keys()
    (tmp_path / "x.safetensors").write_bytes(b"123")
    with pytest.raises(ValueError, match=r"x\.safetensors cannot be read"):
        read_weights(tmp_path / "x.safetensors")


def test_code_in_a_pickle_does_not_run(tmp_path: Path) -> None:
    torch.save({"model": ONE, "hook": Hostile(tmp_path / "ran")}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"x\.pt cannot be read without running its code"):
        read_weights(tmp_path / "x.pt")
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "x.pt", weights_only=False)
    assert (tmp_path / "ran").exists()  # the file would have run it


@pytest.mark.parametrize("content", [[1], {"step": 3}, {}])
def test_files_without_weights_are_refused(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"x\.pt holds .*; give"):
        read_weights(tmp_path / "x.pt")


def test_damaged_files_are_named(tmp_path: Path) -> None:
    torch.save(ONE, tmp_path / "x.pt")
    whole = (tmp_path / "x.pt").read_bytes()
    for cut in (0, 10, len(whole) // 2):
        (tmp_path / "x.pt").write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"x\.pt .*(damaged|cannot be read)"):
            read_weights(tmp_path / "x.pt")


def test_a_format_is_a_file_of_the_folder() -> None:
    assert "llamagen" in formats.names()
    for name in formats.names():
        assert formats.get(name).files
    with pytest.raises(ValueError, match=r"no format 'lamagen'; did you mean 'llamagen'"):
        formats.get("lamagen")
