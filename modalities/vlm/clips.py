"""Read clips: frames of a file, a folder, a list of images or a tensor, selected by count or rate.

    clip = read("birds.mp4", frames=16)
    inputs = processor(text=prompt, **processor_arguments([clip]), return_tensors="pt")

Processors get the time of each frame and do not sample again: temporal positions and time stamps
are those of the clip. Files are decoded by PyAV (`pip install mmspec[video]`), as in transformers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor
from transformers.video_utils import VideoMetadata

from mmspec._renamed import rename_attributes
from mmspec.modalities.common.formatting import convert_to_rgb, open_image
from mmspec.modality import PICTURE_FILES

DEFAULT_FRAMES = 16
PICTURES_HZ = 2.0  # default rate of images without time stamps
COVER = 0x400  # AV_DISPOSITION_ATTACHED_PIC: the cover image of an audio file


@dataclass(frozen=True)
class VideoClip:
    """Selected frames of a source."""

    frames: Tensor  # (F, 3, rows, columns) uint8
    indices: tuple[int, ...]  # in the source
    total: int  # frames of the source
    rate_hz: float  # of the source

    @property
    def metadata(self) -> VideoMetadata:
        """The metadata that processors need in addition to frames."""
        return VideoMetadata(
            total_num_frames=self.total,
            fps=self.rate_hz,
            width=self.frames.shape[-1],
            height=self.frames.shape[-2],
            duration=self.total / self.rate_hz,
            frames_indices=list(self.indices),
        )


def processor_arguments(clips: Sequence[VideoClip]) -> dict[str, Any]:
    """Return arguments of a processor's call for these clips, one per placeholder in the text."""
    return {
        "videos": [clip.frames for clip in clips],
        "video_metadata": [clip.metadata for clip in clips],
        "do_sample_frames": False,
    }


def read(
    source: Any,
    frames: int | None = None,
    fps: float | None = None,
    rate_hz: float = PICTURES_HZ,
) -> VideoClip:
    """Read a clip of `frames` evenly spread frames, or of `fps` frames per second; default: 16.

    `source` is a video file, a folder of images (in the order of their names), a list of images, or
    a tensor (F, 3, rows, columns) uint8; all but files have `rate_hz` frames per second. Raises
    ValueError for a source without frames or that cannot be read, for frames of different sizes,
    and for more frames than the source has.
    """
    if frames is not None and fps is not None:
        raise ValueError(f"frames={frames} and fps={fps:g} are both given; give one of them")
    if not rate_hz > 0:
        raise ValueError(f"rate_hz={rate_hz:g} must be greater than 0 frames per second")
    if isinstance(source, str | Path) and not Path(source).is_dir():
        return _decode_file(Path(source), frames, fps)
    if isinstance(source, Tensor):
        _check_tensor(source)
        which = select_frames("the tensor", len(source), rate_hz, frames, fps)
        return VideoClip(source[which], tuple(which), len(source), rate_hz)
    name = str(source) if isinstance(source, str | Path) else "the list"
    found = _list_images(Path(source)) if isinstance(source, str | Path) else list(source)
    which = select_frames(name, len(found), rate_hz, frames, fps)
    return VideoClip(
        _stack_frames(name, (found[at] for at in which)), tuple(which), len(found), rate_hz
    )


def check(source: Path | list[Path]) -> None:
    """Decode the first frame of a clip. Raises ValueError for one that cannot be read."""
    if isinstance(source, Path) and not source.is_dir():
        with _open_file(source) as (container, stream):
            if next(container.decode(stream), None) is None:
                raise ValueError(f"{source} holds no frames; give a clip of at least one")
        return
    files = _list_images(source) if isinstance(source, Path) else source
    if not files:
        raise ValueError(f"{source} holds no images; give a clip of at least one")
    open_image(files[0])


def select_frames(
    name: str, total: int, rate_hz: float, frames: int | None, fps: float | None
) -> list[int]:
    """Return ascending indices of the selected frames, each in the middle of its share of `total`.

    With `fps` the first frame is index 0. Raises ValueError for no frames, and for too many.
    """
    if not total:
        raise ValueError(f"{name} holds no frames; give a clip of at least one")
    if fps is not None:
        if not 0 < fps <= rate_hz:
            raise ValueError(
                f"fps={fps:g} is out of range for {name}, which has {rate_hz:g} frames per second; "
                "give more than 0 and at most that"
            )
        step = rate_hz / fps
        return [int(at * step) for at in range(max(math.ceil(total / step - 1e-6), 1))]
    count = min(DEFAULT_FRAMES, total) if frames is None else frames
    if not 1 <= count <= total:
        raise ValueError(f"frames={count} of {name}, which has {total}; give 1 to {total}")
    return [(2 * at + 1) * total // (2 * count) for at in range(count)]


def _check_tensor(source: Tensor) -> None:
    if source.dim() != 4 or source.shape[1] != 3 or source.dtype != torch.uint8:
        raise ValueError(
            f"a clip of shape {tuple(source.shape)} and {source.dtype}; give (frames, 3, rows, "
            "columns), torch.uint8"
        )


def _list_images(folder: Path) -> list[Path]:
    """Return the images of a folder in natural order: 10 after 9."""
    found = [path for path in folder.iterdir() if path.suffix.lower() in PICTURE_FILES]
    return sorted(found, key=lambda path: [*map(_number, re.split(r"(\d+)", path.name))])


def _number(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdigit() else (0, part)


def _stack_frames(name: str, pictures: Iterable[Any]) -> Tensor:  # (F, 3, rows, columns) uint8
    """Stack images or image files. Raises ValueError for different sizes."""
    frames: list[Tensor] = []
    for at, one in enumerate(pictures):
        picture = open_image(one) if isinstance(one, str | Path) else one
        if not isinstance(picture, Image.Image):
            raise ValueError(
                f"{name} holds a {type(one).__name__}; give PIL images or image files, or one "
                "tensor (frames, 3, rows, columns)"
            )
        frames.append(pil_to_tensor(convert_to_rgb(picture)))
        if frames[-1].shape != frames[0].shape:
            first, other = (f"{one.shape[2]} x {one.shape[1]}" for one in (frames[0], frames[-1]))
            raise ValueError(
                f"{name}: frame {at} is {other} pixels, but the first one {first}; give frames of "
                "one size"
            )
    return torch.stack(frames)


def _decode_file(file: Path, frames: int | None, fps: float | None) -> VideoClip:
    """Decode a video file. Raises ValueError without PyAV, and for a file without video."""
    with _open_file(file) as (container, stream):
        total = sum(1 for packet in container.demux(stream) if packet.size)
        rate = float(stream.average_rate or stream.guessed_rate or PICTURES_HZ)
        which = select_frames(str(file), total, rate, frames, fps)
        container.seek(0)
        decoded = _stack_frames(str(file), _frames(container, stream, set(which)))
    if len(decoded) < len(which):
        raise ValueError(
            f"{file} is damaged: {len(decoded)} of {len(which)} frames can be decoded; give "
            "another file, or a folder of its frames"
        )
    return VideoClip(decoded, tuple(which), total, rate)


@contextmanager
def _open_file(file: Path) -> Iterator[tuple[Any, Any]]:  # its container and stream
    """Open a video file. Raises ValueError without PyAV, and for what FFmpeg cannot read."""
    if not file.is_file():
        raise ValueError(f"there is no video {file}; give a file, or a folder of images")
    try:
        import av
    except ImportError as error:
        raise ValueError(
            f"{file} cannot be decoded without PyAV; install mmspec[video], or give a folder of "
            "images"
        ) from error
    try:
        with av.open(str(file)) as container:
            yield container, _stream(file, container)
    except av.FFmpegError as error:
        raise ValueError(
            f"{file} is not a video that can be read ({error.strerror or error}); give another "
            "file, or a folder of images"
        ) from error


def _stream(file: Path, container: Any) -> Any:
    """Return the video stream; a cover image is not one."""
    moving = [one for one in container.streams.video if not one.disposition & COVER]
    if not moving:
        kinds = sorted({stream.type for stream in container.streams}) or ["nothing"]
        raise ValueError(
            f"{file} holds no video, only {' and '.join(kinds)}; give a file with a video stream"
        )
    return moving[0]


def _frames(container: Any, stream: Any, indices: set[int]) -> Iterator[Image.Image]:
    """Iterate over the frames with the given indices, rotated as the file specifies."""
    last = max(indices)
    for at, frame in enumerate(container.decode(stream)):
        if at in indices:
            picture: Image.Image = frame.to_image()
            yield picture.rotate(frame.rotation, expand=True) if frame.rotation else picture
        if at == last:
            return


__getattr__ = rename_attributes(__name__, {"shown": "processor_arguments"})
