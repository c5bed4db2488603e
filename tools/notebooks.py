"""Run the notebooks of `docs/notebooks`, keep their outputs: `python -m tools.notebooks [NAME]`.

Each runs in a fresh kernel, on the bundled models, without a network. Outputs are kept small, and
free of what differs between machines: paths, progress bars, execution times.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "notebooks"
MOST_BYTES = 150_000  # of a notebook with its outputs
TIMEOUT_S = 300  # of a cell, on a machine that is busy with other work
FORMATS = (("text/html",), ("image/png", "image/jpeg"), ("text/plain",))  # preferred first
QUIET = {"TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def list_notebooks() -> list[Path]:
    """All notebooks, by name."""
    return sorted(FOLDER.glob("*.ipynb"))


def run_notebook(file: Path) -> Any:
    """The notebook with the outputs of a fresh kernel.

    Raises nbclient's CellExecutionError where a cell fails.
    """
    import nbformat
    from nbclient import NotebookClient

    os.environ |= QUIET
    read: Any = nbformat.read
    notebook = read(file, as_version=4)
    client = NotebookClient(notebook, timeout=TIMEOUT_S, kernel_name="python3")
    client.execute(cwd=str(FOLDER.parents[1]))
    return clean(notebook)


def clean(notebook: Any) -> Any:
    """Drop what differs between machines and runs."""
    notebook.metadata.pop("widgets", None)
    notebook.metadata["language_info"] = {"name": "python"}
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
        cell["metadata"] = {}
        if cell["cell_type"] == "code":
            cell["outputs"] = join_texts(cell["outputs"])
    return notebook


def join_texts(outputs: list[Any]) -> list[Any]:
    """Outputs without messages of libraries, printed lines as one, one format of each value."""
    kept: list[Any] = []
    for one in outputs:
        if one.get("name") == "stderr":
            continue
        if kept and one.get("name") == kept[-1].get("name") == "stdout":
            kept[-1]["text"] += one["text"]
            continue
        kept.append(one)
        if "data" in one:
            name = choose_format(one["data"])
            one["data"] = {name: one["data"][name]}
    return kept


def choose_format(data: Any) -> str:
    """The format of a value that is kept: the richest; of pictures the smallest."""
    group = next(one for one in FORMATS if any(name in data for name in one))
    return min((name for name in group if name in data), key=lambda name: len(data[name]))


def main(names: list[str]) -> None:
    """Run all notebooks, or those that are named, and write them."""
    import nbformat

    for file in list_notebooks():
        if names and file.stem not in names:
            continue
        notebook = run_notebook(file)
        write: Any = nbformat.write
        write(notebook, file)
        size = file.stat().st_size
        print(f"{file.stem}: {size / 1e3:.0f} KB")
        if size > MOST_BYTES:
            raise SystemExit(f"{file.name} has {size} bytes, more than {MOST_BYTES}")


if __name__ == "__main__":
    main(sys.argv[1:])
