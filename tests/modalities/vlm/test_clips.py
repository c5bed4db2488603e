"""Reading clips from files, folders, lists and tensors: selected frames, order, and errors."""

from __future__ import annotations

import io
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from mmspec.modalities.common.formatting import convert_to_rgb, open_image
from mmspec.modalities.vlm.clips import DEFAULT_FRAMES, processor_arguments, read, select_frames

FRAMES, RATE_HZ = 30, 10


def grey(count: int, size: tuple[int, int] = (8, 6)) -> list[Image.Image]:
    """Pictures that tell which they are."""
    return [Image.new("RGB", size, (at, at, at)) for at in range(count)]


def numbers(frames: Tensor) -> list[int]:
    found: list[int] = frames.float().mean((1, 2, 3)).round().int().tolist()
    return found


def film(path: Path, count: int = FRAMES) -> Path:
    """A video of 48 x 32 pixels that brightens by 8 a frame, its left half black."""
    av = pytest.importorskip("av", reason="mmspec[video] is not installed")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=RATE_HZ)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        for at in range(count):
            picture = Image.new("RGB", (48, 32), (8 * at,) * 3)
            picture.paste((0, 0, 0), (0, 0, 24, 32))
            container.mux(stream.encode(av.VideoFrame.from_image(picture)))
        container.mux(stream.encode())
    return path


def brightness(frames: Tensor) -> list[int]:
    return [round(value / 8) for value in numbers(frames[..., -16:])]


def test_frames_are_evenly_spread() -> None:
    assert select_frames("it", 30, 10.0, 4, None) == [3, 11, 18, 26]
    assert select_frames("it", 5, 10.0, 5, None) == [0, 1, 2, 3, 4]
    assert select_frames("it", 7, 10.0, 1, None) == [3]
    assert len(select_frames("it", 99, 10.0, None, None)) == DEFAULT_FRAMES
    assert select_frames("it", 3, 10.0, None, None) == [0, 1, 2]
    assert select_frames("it", 30, 10.0, None, 2.0) == [0, 5, 10, 15, 20, 25]
    assert select_frames("it", 30, 10.0, None, 10.0) == list(range(30))
    assert select_frames("it", 7, 10.0, None, 3.0) == [0, 3, 6]
    assert select_frames("it", 1, 10.0, None, 0.5) == [0]


def test_pictures_and_tensors_are_clips() -> None:
    clip = read(grey(6), frames=3)
    assert numbers(clip.frames) == [1, 3, 5]
    assert clip.frames.shape == (3, 3, 6, 8)
    assert (clip.total, clip.rate_hz, clip.indices) == (6, 2.0, (1, 3, 5))
    same = read(read(grey(6)).frames, fps=1.0)
    assert numbers(same.frames) == [0, 2, 4]
    assert same.metadata.sampled_fps == 1.0
    assert same.metadata.timestamps == [0.0, 1.0, 2.0]
    given = processor_arguments([clip, same])
    assert [len(one) for one in given["videos"]] == [3, 3]
    assert given["do_sample_frames"] is False


def test_a_folder_is_read_in_the_order_of_its_numbers(tmp_path: Path) -> None:
    for at, picture in enumerate(grey(12)):
        picture.save(tmp_path / f"frame{at}.png")
    (tmp_path / "notes.txt").write_text("no picture")
    assert numbers(read(tmp_path).frames) == list(range(12))


def test_a_file_is_decoded(tmp_path: Path) -> None:
    clip = read(film(tmp_path / "film.mp4"), frames=4)
    assert (clip.total, clip.rate_hz, clip.indices) == (30, 10.0, (3, 11, 18, 26))
    assert brightness(clip.frames) == [3, 11, 18, 26]
    assert clip.frames.shape == (4, 3, 32, 48)
    assert clip.metadata.duration == 3.0
    assert brightness(read(str(tmp_path / "film.mp4"), fps=2.5).frames) == list(range(0, 30, 4))


def test_what_a_phone_turned_is_turned_back(tmp_path: Path) -> None:
    """A quarter to the right, as a player shows it: the black half comes on top."""
    path = film(tmp_path / "film.mp4")
    content = bytearray(path.read_bytes())
    matrix = content.index(b"tkhd") + 4 + 40  # behind the head of the box
    content[matrix : matrix + 36] = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)
    path.write_bytes(content)
    frames = read(path, frames=2).frames
    assert frames.shape == (2, 3, 48, 32)
    assert int(frames[:, :, :20].max()) < 12
    assert int(frames[:, :, -20:].min()) > 30


def test_sound_alone_is_no_clip(tmp_path: Path) -> None:
    av = pytest.importorskip("av", reason="mmspec[video] is not installed")
    path = tmp_path / "song.wav"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        stream.layout = "mono"
        silence: Any = torch.zeros(1, 800, dtype=torch.int16).numpy()
        frame = av.AudioFrame.from_ndarray(silence, format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
    with pytest.raises(ValueError, match="holds no video, only audio; give a file with a video"):
        read(path)


def test_damaged_files_say_so(tmp_path: Path) -> None:
    whole = film(tmp_path / "film.mp4").read_bytes()
    for name, content in {
        "short": whole[:300],
        "noise": b"\xff" * 999,
        "empty": b"",
        "hole": whole[:600] + bytes(len(whole) // 2) + whole[600 + len(whole) // 2 :],
    }.items():
        path = tmp_path / f"{name}.mp4"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"can be (read|decoded).*; give another file"):
            read(path)


def test_without_pyav_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    (tmp_path / "film.mp4").write_bytes(b"anything")
    with pytest.raises(ValueError, match=r"without PyAV; install mmspec\[video\], or"):
        read(tmp_path / "film.mp4")


@pytest.mark.parametrize(
    ("source", "how", "message"),
    [
        ([], {}, "the list holds no frames; give a clip of at least one"),
        (grey(3), {"frames": 4}, "frames=4 of the list, which has 3; give 1 to 3"),
        (grey(3), {"frames": 0}, "frames=0 of the list, which has 3; give 1 to 3"),
        (
            grey(3),
            {"fps": 2.5},
            "fps=2.5 is out of range for the list, which has 2 frames per second",
        ),
        (grey(3), {"fps": 0.0}, "fps=0 is out of range"),
        (grey(3), {"rate_hz": 0.0}, "rate_hz=0 must be greater than 0 frames per second"),
        (grey(3), {"fps": 1.0, "frames": 2}, "are both given; give one of them"),
        ([*grey(2), *grey(1, (6, 8))], {}, "frame 2 is 6 x 8 pixels, but the first one 8 x 6"),
        ([1, 2], {}, "the list holds a int; give PIL images"),
        (torch.zeros(4, 3, 8, 8), {}, r"float32; give \(frames, 3, rows, columns\), torch.uint8"),
        (torch.zeros(4, 8, 8, 3, dtype=torch.uint8), {}, r"shape \(4, 8, 8, 3\)"),
        (torch.zeros(0, 3, 8, 8, dtype=torch.uint8), {}, "the tensor holds no frames"),
        ("nowhere.mp4", {}, "there is no video nowhere.mp4; give a file, or a folder"),
    ],
)
def test_what_is_no_clip(source: Any, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(source, **how)


def test_what_is_transparent_is_white(tmp_path: Path) -> None:
    seen = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    seen.paste((255, 0, 0, 255), (0, 0, 2, 2))
    seen.save(tmp_path / "a.png")
    for picture in (open_image(tmp_path / "a.png"), convert_to_rgb(seen.convert("LA"))):
        assert picture.getpixel((3, 3)) == (255, 255, 255)
    assert open_image(tmp_path / "a.png").getpixel((0, 0)) == (255, 0, 0)
    assert convert_to_rgb(seen.convert("RGB")).getpixel((3, 3)) == (0, 0, 0)


def test_an_empty_folder_and_a_damaged_picture(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no frames"):
        read(tmp_path)
    whole = io.BytesIO()
    Image.effect_noise((64, 64), 9.0).save(whole, "PNG")
    for content in (b"no picture", b"", whole.getvalue()[:2000]):
        (tmp_path / "a.png").write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.png is not an image that can be read"):
            read(tmp_path)


def test_an_image_of_too_many_pixels_is_not_decoded(tmp_path: Path) -> None:
    Image.new("1", (8001, 8000)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"8001 x 8000 pixels\); give .* at most 64 million"):
        read(tmp_path)
