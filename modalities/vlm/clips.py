"""Clips: frames out of a file, a folder, pictures or a tensor, chosen by number or by rate.

    clip = read("birds.mp4", frames=16)
    inputs = processor(text=prompt, **shown([clip]), return_tensors="pt")

Processors are told when each frame was shown, and sample nothing again: temporal positions and
time stamps are those of the clip. Files are decoded by PyAV, as transformers does; the rest needs
nothing: `pip install mmspec[video]`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor
from transformers.video_utils import VideoMetadata

from mmspec.modalities.common.pictures import open_picture
from mmspec.modality import PICTURE_FILES

USUAL = 16  # frames where nothing is said
PICTURES_HZ = 2.0  # pictures that come without times: so many a second
COVER = 0x400  # AV_DISPOSITION_ATTACHED_PIC: a single picture beside a song


@dataclass(frozen=True)
class VideoClip:
    """Frames of a source, and which they are."""

    frames: Tensor  # (F, 3, rows, columns) uint8
    indices: tuple[int, ...]  # in the source
    total: int  # frames that the source has
    rate_hz: float  # at which it shows them

    @property
    def metadata(self) -> VideoMetadata:
        """What processors ask for beside frames."""
        return VideoMetadata(
            total_num_frames=self.total,
            fps=self.rate_hz,
            width=self.frames.shape[-1],
            height=self.frames.shape[-2],
            duration=self.total / self.rate_hz,
            frames_indices=list(self.indices),
        )


def shown(clips: Sequence[VideoClip]) -> dict[str, Any]:
    """Arguments of a processor's call that show these clips, one per place in the text."""
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
    """A clip of `frames` frames, evenly spread, or of `fps` a second; of 16 if neither is said.

    `source` is a video file, a folder of pictures (in the order of their names), a list of
    pictures, or a tensor (F, 3, rows, columns) uint8. All but files show `rate_hz` frames a second.
    Raises ValueError for what holds no frames or cannot be read, frames of different sizes, and
    more frames than there are.
    """
    if frames is not None and fps is not None:
        raise ValueError(f"frames={frames} and fps={fps:g} both say how many; give one of them")
    if not rate_hz > 0:
        raise ValueError(f"rate_hz={rate_hz:g} shows no frames; give more than 0 a second")
    if isinstance(source, str | Path) and not Path(source).is_dir():
        return _decoded(Path(source), frames, fps)
    if isinstance(source, Tensor):
        _check_tensor(source)
        which = chosen("the tensor", len(source), rate_hz, frames, fps)
        return VideoClip(source[which], tuple(which), len(source), rate_hz)
    name = str(source) if isinstance(source, str | Path) else "the list"
    found = _pictures(Path(source)) if isinstance(source, str | Path) else list(source)
    which = chosen(name, len(found), rate_hz, frames, fps)
    return VideoClip(_stacked(name, (found[at] for at in which)), tuple(which), len(found), rate_hz)


def chosen(
    name: str, total: int, rate_hz: float, frames: int | None, fps: float | None
) -> list[int]:
    """Ascending indices of the frames that are wanted of `total`, each in the middle of its share.

    By rate they begin with the first one. Raises ValueError for none, and for more than there are.
    """
    if not total:
        raise ValueError(f"{name} holds no frames; give a clip of at least one")
    if fps is not None:
        if not 0 < fps <= rate_hz:
            raise ValueError(
                f"fps={fps:g} is no rate for {name}, which shows {rate_hz:g} frames a second; give "
                "more than 0 and at most that"
            )
        step = rate_hz / fps
        return [int(at * step) for at in range(max(math.ceil(total / step - 1e-6), 1))]
    count = min(USUAL, total) if frames is None else frames
    if not 1 <= count <= total:
        raise ValueError(f"frames={count} of {name}, which has {total}; give 1 to {total}")
    return [(2 * at + 1) * total // (2 * count) for at in range(count)]


def _check_tensor(source: Tensor) -> None:
    if source.dim() != 4 or source.shape[1] != 3 or source.dtype != torch.uint8:
        raise ValueError(
            f"a clip of shape {tuple(source.shape)} and {source.dtype}; give (frames, 3, rows, "
            "columns), torch.uint8"
        )


def _pictures(folder: Path) -> list[Path]:
    """Its pictures, so that 10 stands behind 9."""
    found = [path for path in folder.iterdir() if path.suffix.lower() in PICTURE_FILES]
    return sorted(found, key=lambda path: [*map(_number, re.split(r"(\d+)", path.name))])


def _number(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdigit() else (0, part)


def _stacked(name: str, pictures: Iterable[Any]) -> Tensor:  # (F, 3, rows, columns) uint8
    """Pictures or their files, in memory. Raises ValueError for those of another size."""
    frames: list[Tensor] = []
    for at, one in enumerate(pictures):
        picture = open_picture(one) if isinstance(one, str | Path) else one
        if not isinstance(picture, Image.Image):
            raise ValueError(
                f"{name} holds a {type(one).__name__}; give pictures of PIL or their files, or one "
                "tensor (frames, 3, rows, columns)"
            )
        frames.append(pil_to_tensor(picture.convert("RGB")))
        if frames[-1].shape != frames[0].shape:
            first, other = (f"{one.shape[2]} x {one.shape[1]}" for one in (frames[0], frames[-1]))
            raise ValueError(
                f"{name}: frame {at} is {other} pixels, but the first one {first}; give frames of "
                "one size"
            )
    return torch.stack(frames)


def _decoded(file: Path, frames: int | None, fps: float | None) -> VideoClip:
    """A clip out of a file. Raises ValueError without PyAV, and for what holds no video."""
    if not file.is_file():
        raise ValueError(f"there is no video {file}; give a file, or a folder of pictures")
    try:
        import av
    except ImportError as error:
        raise ValueError(
            f"{file} cannot be decoded without PyAV; install mmspec[video], or give a folder of "
            "pictures"
        ) from error
    try:
        with av.open(str(file)) as container:
            stream = _stream(file, container)
            total = sum(1 for packet in container.demux(stream) if packet.size)
            rate = float(stream.average_rate or stream.guessed_rate or PICTURES_HZ)
            which = chosen(str(file), total, rate, frames, fps)
            container.seek(0)
            shown = _stacked(str(file), _frames(container, stream, set(which)))
    except av.FFmpegError as error:
        raise ValueError(
            f"{file} is not a video that can be read ({error.strerror or error}); give another "
            "file, or a folder of pictures"
        ) from error
    if len(shown) < len(which):
        raise ValueError(
            f"{file} is damaged: {len(shown)} of {len(which)} frames can be decoded; give another "
            "file, or a folder of its pictures"
        )
    return VideoClip(shown, tuple(which), total, rate)


def _stream(file: Path, container: Any) -> Any:
    """The stream of moving pictures; the cover of a song is none."""
    moving = [one for one in container.streams.video if not one.disposition & COVER]
    if not moving:
        kinds = sorted({stream.type for stream in container.streams}) or ["nothing"]
        raise ValueError(
            f"{file} holds no video, only {' and '.join(kinds)}; give a file with moving pictures"
        )
    return moving[0]


def _frames(container: Any, stream: Any, wanted: set[int]) -> Iterator[Image.Image]:
    """The wanted frames, turned as a player would turn them."""
    last = max(wanted)
    for at, frame in enumerate(container.decode(stream)):
        if at in wanted:
            picture: Image.Image = frame.to_image()
            yield picture.rotate(frame.rotation, expand=True) if frame.rotation else picture
        if at == last:
            return
