"""`mmspec train --data`: rows are checked before the target is loaded."""

from __future__ import annotations

import base64
import json
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from mmspec import registry
from mmspec.cli import main
from mmspec.cli.training_data import _unreadable_rows
from mmspec.training.conversations import read_data_set
from mmspec.training.media import Media, MediaFolders
from mmspec.training.processes import Processes
from mmspec.zoo.scene import sample
from mmspec.zoo.scene_tensors import render_pixels
from tests.cli.running import fail, run

SHORT = ("--max-new-tokens", "4")
ANSWER = "what is at the top? a red circle."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images, two of them damaged, and a clip."""
    found = tmp_path_factory.mktemp("data")
    (found / "clip").mkdir()
    for number in range(4):
        image = Image.fromarray(render_pixels(sample(number)))
        image.save(found / f"{number}.png")
        image.save(found / "clip" / f"{number}.png")
    Image.new("RGB", (64, 64), "red").save(found / "cut.jpg")
    (found / "cut.jpg").write_bytes((found / "cut.jpg").read_bytes()[:600])
    (found / "broken.png").write_bytes(b"no")
    (found / "broken.mp4").write_bytes(b"no")
    return found


def _rows() -> list[Any]:
    """A row of each kind that zoo:qwen2.5-vl reads."""
    stream = BytesIO()
    Image.fromarray(render_pixels(sample(9))).save(stream, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"
    image: Any = {"type": "image_url", "image_url": {"url": url}}
    text = {"type": "text", "text": "what is it?"}
    clip = {"type": "video", "video": "clip"}
    answer = {"role": "assistant", "content": ANSWER}
    return [
        {"prompt": "is it red?", "image": "0.png", "answer": ANSWER},
        {"messages": [{"role": "user", "content": [image, text]}, answer]},
        {"messages": [{"role": "user", "content": [clip, text]}, answer]},
        {
            "conversations": [
                {"from": "human", "value": "<video>\n<image>what is it?"},
                {"from": "gpt", "value": ANSWER},
            ],
            "videos": [["1.png", "2.png"]],
            "image": "3.png",
        },
        {"prompt": "text alone", "answer": ANSWER},
    ]


def _command(folder: Path, out: Path, rows: Any, *more: str, target: str = "qwen2.5-vl") -> Any:
    (folder / "rows.json").write_text(json.dumps(rows))
    given = ["train", "eagle-3", "--target", f"zoo:{target}", "--data", str(folder / "rows.json")]
    return [
        *given,
        "--out",
        str(out),
        "--answers",
        "data",
        "--steps",
        "1",
        "--batch",
        "2",
        *SHORT,
        *more,
    ]


def test_media_of_all_kinds_are_trained_on(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = {"type": "function", "function": {"name": "find", "arguments": "{}"}}
    bad = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]},
                      {"role": "tool", "content": "b"}]},
        {"prompt": "is <|image_pad|> a token?"},
        {"prompt": "is it cut?", "image": "cut.jpg"},
        {"prompt": "is it?", "video": "broken.mp4"},
    ]  # fmt: skip
    asked = _command(folder, tmp_path / "out", [*_rows(), *bad])
    found = run(capsys, *asked, "--max-bad-rows", "4")
    assert (found["questions"] + found["held out"], found["left out"]) == (5, 4)
    listed = [json.loads(one) for one in (tmp_path / "out" / "bad_rows.jsonl").open()]
    reasons = {one["place"].partition("(")[2]: one["reason"] for one in listed}
    assert "cut.jpg is not an image that can be read" in reasons["row 8)"]
    assert "broken.mp4 is not a video" in reasons["row 9)"]
    assert "which the target's chat template leaves out" in reasons["row 6)"]
    assert "has a text with the token <|image_pad|>" in reasons["row 7)"]
    answers = [json.loads(one) for one in (tmp_path / "out" / "answers.jsonl").open()]
    assert answers[3]["prompt"] > answers[2]["prompt"] > answers[4]["prompt"]  # tokens of media
    Image.new("RGB", (64, 64), "red").save(folder / "cut.jpg")  # readable now: other numbers
    line = fail(capsys, *asked, "--max-bad-rows", "4")[1]
    assert "was begun with data=" in line


def test_bad_rows_are_an_error_before_the_target_is_loaded(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(registry, "plug", load)
    rows = [*_rows(), *({"prompt": "a", "image": name} for name in ("broken.png", "none.png"))]
    asked = _command(folder, tmp_path / "out", rows)
    line = fail(capsys, *asked)[1]  # files that are not there are found first
    assert "names the image none.png, but there is no file" in line
    assert "1 of 7 rows cannot be used; correct them, or give --max-bad-rows 1" in line
    line = fail(capsys, *asked, "--max-bad-rows", "1")[1]
    assert "names broken.png: broken.png is not an image" in line
    assert "2 of 7 rows cannot be used" in line
    assert not (tmp_path / "out").exists()


def test_a_target_without_video_refuses_clips(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = _command(folder, tmp_path / "out", _rows(), "--dry-run", target="llava")
    assert "reads images and takes no video, but" in fail(capsys, *asked)[1]


def test_images_elsewhere_need_an_option(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "a", "image": str(folder / f"{at}.png")} for at in range(2)]
    (tmp_path / "data").mkdir()
    asked = _command(tmp_path / "data", tmp_path / "out", rows, "--dry-run", target="llava")
    assert f"or --image-root {folder}" in fail(capsys, *asked)[1]
    assert run(capsys, *asked, "--image-root", str(folder))["pictures"] == 2
    rows = [{"prompt": "a", "image": "http://127.0.0.1:9/a.png"}, {"prompt": "b"}]
    asked = _command(tmp_path / "data", tmp_path / "out", rows, target="llava")
    assert "give --allow-urls to download it" in fail(capsys, *asked)[1]
    assert main([*asked, "--allow-urls"]) == 1
    assert "which cannot be downloaded" in capsys.readouterr().err


def test_processes_share_the_images_and_find_all_bad_rows(folder: Path, tmp_path: Path) -> None:
    """Every image is opened by one of them."""
    names = ("0.png", "broken.png", "1.png", "broken.mp4", "2.png", "broken.png", "3.png")
    rows = [{"prompt": "is it red?", "image": name} for name in names]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = read_data_set(tmp_path / "rows.jsonl", MediaFolders(folder))
    opened: list[str] = []

    def check(media: Media) -> None:
        opened.append(media.name)
        check_media(media)

    check_media = registry.training_data(registry.find_modality("zoo:llava")).check_media
    for count in (1, 2, 3):
        states = [SimpleNamespace(num_processes=count, process_index=rank) for rank in range(count)]
        shares = [_unreadable_rows(data, check, False, Processes(one)) for one in states]
        assert sorted(row for share in shares for row in share) == [1, 3, 5]
        assert sorted(opened) == sorted({*names})
        opened.clear()
