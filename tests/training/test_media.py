"""Media lie in the folders that were given, also where links lead to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from mmspec.training import media
from mmspec.training.media import IMAGE, VIDEO, Media, MediaFolders, download


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """A data folder with links into and out of it, and a folder beside it."""
    for name in ("data", "data/deep", "store"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.png").write_bytes(b"x")
    (tmp_path / "data" / "inner.png").symlink_to("deep/a.png")
    (tmp_path / "data" / "outer.png").symlink_to(tmp_path / "store" / "a.png")
    (tmp_path / "data" / "store").symlink_to(tmp_path / "store")
    (tmp_path / "data" / "loop.png").symlink_to("loop.png")
    (tmp_path / "linked").symlink_to(tmp_path / "data")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../store/a.png", "is outside of .*; give --images .* or --image-root"),
        ("STORE/a.png", "is outside of"),
        ("file://STORE/a.png", "is outside of"),
        ("outer.png", "a link to .*store/a.png, which is outside of .*; give --image-root .*store"),
        ("store/a.png", "a link to .*store/a.png, which is outside"),
        ("loop.png", "which is no name of a file|no file"),
        ("none.png", "there is no file"),
        ("deep", "there is no file"),
        ("x" * 5000, "which is no name of a file"),
        ("a\0b", "which is no name of a file"),
    ],
)
def test_files_outside_are_refused(folders: Path, name: str, reason: str) -> None:
    name = name.replace("STORE", str(folders / "store"))
    with pytest.raises(ValueError, match=reason):
        MediaFolders(folders / "data").find(name, IMAGE)


@pytest.mark.parametrize("base", ["data", "linked"])
def test_another_folder_may_be_allowed(folders: Path, base: str) -> None:
    own = MediaFolders(folders / base)
    for name in ("a.png", "deep/../a.png", "inner.png", str(folders / base / "a.png")):
        assert own.find(name, IMAGE).source() is not None
    more = MediaFolders(folders / base, (folders / "store",))
    for name in ("../store/a.png", str(folders / "store" / "a.png"), "outer.png", "store/a.png"):
        assert more.find(name, IMAGE).size() == 1
    with pytest.raises(ValueError, match=r"there is no folder .*; give --image-root"):
        MediaFolders(folders, (folders / "none",))


def test_a_clip_is_a_file_a_folder_or_frames(folders: Path) -> None:
    own = MediaFolders(folders / "data")
    assert own.find("deep", VIDEO).clip() == folders / "data" / "deep"
    assert own.find(["a.png", "inner.png"], VIDEO).clip() == [
        folders / "data" / "a.png",
        folders / "data" / "inner.png",
    ]
    with pytest.raises(ValueError, match="frames in the data"):
        own.find(["a.png", "data:image/png;base64,aGk="], VIDEO)


@pytest.fixture
def server(folders: Path) -> Iterator[str]:
    """A server of the data folder."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    made = HTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folders / "data")))
    thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()
    made.server_close()


def test_a_file_of_the_network_is_downloaded_once(
    folders: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = MediaFolders(folders / "data", downloads=folders / "downloads")
    found = own.find({"url": f"{server}/a.png"}, IMAGE)
    assert not (folders / "downloads").exists()  # found, not fetched
    download(found)
    (folders / "data" / "a.png").write_bytes(b"other")
    download(found)
    assert [one.read_bytes() for one in (folders / "downloads").iterdir()] == [b"x"]
    with pytest.raises(ValueError, match=r"none.png, which cannot be downloaded \(HTTP Error 404"):
        download(own.find(f"{server}/none.png", IMAGE))
    monkeypatch.setattr(media, "MAX_DOWNLOAD_BYTES", 2)
    with pytest.raises(ValueError, match="has more than 0 MiB"):
        download(own.find(f"{server}/a.png?again", IMAGE))
    assert len(list((folders / "downloads").iterdir())) == 1
    with pytest.raises(ValueError, match="give --allow-urls"):
        MediaFolders(folders).find(f"{server}/a.png", IMAGE)
    assert isinstance(found, Media)
