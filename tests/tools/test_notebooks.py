"""Notebooks are small, hold their outputs, name no machine, and run in a fresh kernel."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mmspec import _renamed
from tools import notebooks

FILES = notebooks.list_notebooks()
NAMES = ["diffusion", "images", "robots", "speech-recognition", "speech-synthesis", "vlm"]
PLACE = re.compile(
    r"/(root|home|Users|tmp|opt|mnt)/|[A-Z]:\\\\|0x[0-9a-f]{8}|localhost|127\.0\.0\.1"
)


def test_there_is_one_for_each_modality() -> None:
    assert [one.stem for one in FILES] == NAMES


@pytest.mark.parametrize("file", FILES, ids=lambda one: one.stem)
def test_outputs_are_whole_and_small_and_name_no_machine(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert len(text.encode()) < notebooks.MOST_BYTES
    cells = [one for one in json.loads(text)["cells"] if one["cell_type"] == "code"]
    assert [one["execution_count"] for one in cells] == list(range(1, len(cells) + 1))
    outputs = [one for cell in cells for one in cell["outputs"]]
    assert {one["output_type"] for one in outputs} <= {"stream", "execute_result"}
    assert sum("srcdoc" in str(one.get("data")) for one in outputs) >= 1  # a trace
    shown = [one.get("text") or one["data"].get("text/plain", "") for one in outputs]
    source = [line for cell in cells for line in cell["source"]]
    assert not PLACE.search("".join(map("".join, [*shown, source])))


def test_no_notebook_imports_a_module_by_its_old_name() -> None:
    old = re.compile("|".join(rf"{re.escape(name)}\b" for name in _renamed.MODULES))
    assert old.search("from mmspec.modalities.speech.sound import read")
    assert not [one.name for one in FILES if old.search(one.read_text(encoding="utf-8"))]


def test_what_differs_between_machines_is_dropped() -> None:
    nbformat: Any = pytest.importorskip("nbformat", reason="nbformat is not installed")
    made = nbformat.v4
    outputs = [
        made.new_output("stream", name="stdout", text="a\n"),
        made.new_output("stream", name="stderr", text="Loading: 100%"),
        made.new_output("stream", name="stdout", text="b\n"),
        made.new_output("execute_result", {"text/plain": "<Trace at 0x12>", "text/html": "<p>"}),
    ]
    cell = made.new_code_cell("x", outputs=outputs, metadata={"execution": {"start": "now"}})
    cleaned = notebooks.clean(made.new_notebook(cells=[cell], metadata={"widgets": {}}))
    (only,) = cleaned.cells
    assert [one.get("text") or dict(one["data"]) for one in only["outputs"]] == [
        "a\nb\n",
        {"text/html": "<p>"},
    ]
    assert only["metadata"] == {}
    assert cleaned.metadata == {"language_info": {"name": "python"}}


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda one: one.stem)
def test_every_cell_runs_in_a_fresh_kernel(file: Path) -> None:
    pytest.importorskip("nbclient", reason="mmspec[docs] is not installed")
    pytest.importorskip("ipykernel", reason="mmspec[docs] is not installed")
    before = json.loads(file.read_text(encoding="utf-8"))["cells"]
    after = notebooks.run_notebook(file)["cells"]
    for old, new in zip(before, after, strict=True):
        kinds = [[one["output_type"] for one in cell.get("outputs", ())] for cell in (old, new)]
        assert kinds[0] == kinds[1], old["source"]
        assert list_claims(new) == list_claims(old)


def list_claims(cell: Any) -> list[str]:
    """Printed comparisons with the model's own output, which hold on every machine."""
    texts = ("".join(one.get("text", "")) for one in cell.get("outputs", ()))
    return re.findall(r"same [a-z]+: (\w+)", "\n".join(texts))
