"""JSON arrays are streamed, damaged ones are one error; parquet goes through `datasets`."""

from __future__ import annotations

import json
import random
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mmspec.training import data_files
from mmspec.training.conversations import read_data_set
from mmspec.training.data_files import DataRow, hash_data, read_rows
from mmspec.training.media import MediaFolders

ROWS = [{"prompt": f"number {at} äß", "n": at} for at in range(50)]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_an_array_is_read_in_pieces(
    tmp_path: Path, chunk: int, indent: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_files, "_CHUNK", chunk)
    file = tmp_path / "a.json"
    file.write_text("\ufeff " + json.dumps(ROWS, indent=indent, ensure_ascii=False) + "\n")
    found = list(read_rows(file))
    assert [one.content for one in found if isinstance(one, DataRow)] == ROWS
    lines = [2 + 4 * at for at in range(50)] if indent else [1] * 50
    assert [one.place for one in found] == [
        f"{file}:{line} (row {number})" for number, line in enumerate(lines, 1)
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"a": 1}, {"a"', r"a\.json:1 is not part of a JSON array"),
        ('[{"a": 1}\n {"b": 1}]', r"a\.json:2 .*'\{' where , or \] belongs"),
        ("[1, 2] 3", "text after the end of the array"),
        ("", r"the end of the file where \[ belongs"),
        ("5", r"'5' where \[ belongs"),
        ("[" * 100_000, "nested too deeply|recursion"),
        ('[{"a": 1}, "\\x"]', "Invalid .escape"),
        ('{"a":\n 1}', "is a JSON object, not an array of rows"),
        (b"[\xff]", "is not UTF-8 text"),
    ],
)
def test_a_damaged_array_is_one_error(tmp_path: Path, text: str | bytes, message: str) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        list(read_rows(file))


def test_any_damage_of_an_array_is_an_error_or_bad_rows(tmp_path: Path) -> None:
    generator, file = random.Random(0), tmp_path / "a.json"
    whole = json.dumps(ROWS[:5], indent=1).encode()
    for _ in range(200):
        text = bytearray(whole)
        text[generator.randrange(len(text))] = generator.randrange(256)
        file.write_bytes(text[: generator.randrange(1, len(text))])
        with pytest.raises(ValueError, match=r"a\.json"):
            list(read_rows(file))


def test_json_lines_may_be_called_json(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    assert [one.content for one in read_rows(file) if isinstance(one, DataRow)] == ROWS
    assert [one.place for one in read_rows(tmp_path)] == [f"{file}:{n}" for n in range(1, 51)]
    before = hash_data(file)
    file.write_text("\n".join(map(json.dumps, ROWS[1:])))
    assert hash_data(file) != before


@pytest.mark.exhaustive
def test_images_in_a_parquet_file_are_read_when_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    images = [Image.new("RGB", (8, 8), (at, 0, 0)) for at in range(70)]
    message = [[{"role": "user", "content": f"<image>{at}"}] for at in range(70)]
    columns: dict[str, Any] = {"messages": message, "images": [[one] for one in images]}
    features = datasets.Features(
        {
            "messages": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
            "images": datasets.List(datasets.Image()),
        }
    )
    made = datasets.Dataset.from_dict(columns, features=features)
    made.to_parquet(str(tmp_path / "a.parquet"))
    found = read_data_set(tmp_path, MediaFolders(tmp_path))
    assert (len(found.questions), found.bad) == (70, [])
    for at, one in enumerate(found.questions):
        source = one.images[0].source()
        assert isinstance(source, BytesIO)
        assert Image.open(source).getpixel((0, 0)) == (at, 0, 0)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ValueError, match=r"a\.parquet is not a readable parquet file"):
        list(read_rows(tmp_path))


def test_a_parquet_file_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"install mmspec\[data\]"):
        list(read_rows(tmp_path / "a.parquet"))
