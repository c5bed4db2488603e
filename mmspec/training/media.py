"""Images and clips of training data: files, bytes in the data, or addresses of the network.

A file must lie in one of the folders that were given, also where links lead to.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from mmspec.errors import with_article
from mmspec.training.parquet_files import StoredBytes

IMAGE, VIDEO = "image", "video"
MAX_DOWNLOAD_BYTES = 256 << 20
SECONDS = 30.0  # without an answer of a server
_SHOWN = 80  # characters of a name in messages


@dataclass(frozen=True, slots=True)
class Media:
    """An image or a clip: a file, the frames of a clip, or bytes."""

    kind: str  # IMAGE or VIDEO
    name: str  # in messages
    files: tuple[Path, ...] = ()
    data: bytes | StoredBytes | None = None
    url: str | None = None  # where the file is downloaded from

    def source(self) -> Path | BytesIO:
        """What a reader of images opens: a file, or bytes."""
        if self.data is not None:
            return BytesIO(self.data if isinstance(self.data, bytes) else self.data.read())
        return self.files[0]

    def clip(self) -> Path | list[Path]:
        """What a reader of clips opens: a file, a folder, or frames in order."""
        return self.files[0] if len(self.files) == 1 else list(self.files)

    def size(self) -> int:
        """Bytes of the files, or of the data; those in a parquet file count as 0."""
        if self.data is not None:
            return len(self.data) if isinstance(self.data, bytes) else 0
        return sum(one.stat().st_size for one in self.files if one.is_file())


@dataclass(frozen=True)
class MediaFolders:
    """Where images and clips may lie.

    `base` is what names are relative to, `roots` are other folders that names or links may lead to.
    `downloads` is the folder for files of the network; None = addresses are refused.
    """

    base: Path
    roots: tuple[Path, ...] = ()
    downloads: Path | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for folders that do not exist."""
        for option, folder in [("images", self.base), *(("image-root", one) for one in self.roots)]:
            if not folder.is_dir():
                raise ValueError(f"there is no folder {folder}; give --{option} an existing one")

    def find(self, value: Any, kind: str) -> Media:
        """Return the media that a row names. Raises ValueError for what is none."""
        if isinstance(value, Mapping):
            if value.get("bytes"):
                return self.find(value["bytes"], kind)
            value = value.get("url") or value.get("path")
        if isinstance(value, bytes | StoredBytes):
            return self._embedded(value, kind)
        if isinstance(value, Sequence) and not isinstance(value, str) and kind == VIDEO and value:
            frames = [self.find(one, IMAGE) for one in value]
            if not all(len(one.files) == 1 for one in frames):
                raise ValueError("has a clip with frames in the data; name files")
            return Media(VIDEO, frames[0].name, tuple(one.files[0] for one in frames))
        if not isinstance(value, str) or not value:
            raise ValueError(
                f"has {with_article(kind)} that is not a file name; give names of files"
            )
        scheme = value[:16].partition(":")[0].lower()
        if scheme == "data":
            return self._embedded(_decode(value), kind)
        if scheme in ("http", "https"):
            return self._remote(value, kind)
        if scheme == "file" and value[5:7] == "//":
            value = unquote(urlsplit(value).path)
        return Media(kind, shorten(value), (self._locate(value, kind),))

    @cached_property
    def _folders(self) -> list[Path]:
        """The folders, and what they are links to."""
        given = [Path(os.path.abspath(one)) for one in (self.base, *self.roots)]
        return [*given, *(one.resolve() for one in given)]

    def _embedded(self, data: bytes | StoredBytes, kind: str) -> Media:
        if kind == VIDEO:
            raise ValueError("has a video within the data; name a file")
        return Media(kind, f"an {kind} in the data", data=data)

    def _remote(self, url: str, kind: str) -> Media:
        if self.downloads is None:
            raise ValueError(
                f"names {shorten(url)} on the network; give --allow-urls to download it, or a file"
            )
        name = hashlib.sha256(url.encode()).hexdigest()[:32]
        return Media(kind, shorten(url), (self.downloads / name,), url=url)

    def _locate(self, name: str, kind: str) -> Path:
        """The file of a name. Raises ValueError outside of the folders and for missing files."""
        file = self.base / name
        try:
            lexical, real = Path(os.path.abspath(file)), file.resolve()
            exists = real.is_file() or (kind == VIDEO and real.is_dir())
        except (OSError, RuntimeError, ValueError) as error:
            reason = shorten(str(error))
            raise ValueError(
                f"names the {kind} {shorten(name)}, which is no name of a file ({reason})"
            ) from error
        if not any(map(lexical.is_relative_to, self._folders)):
            raise ValueError(
                f"names the {kind} {shorten(name)}, which is outside of {self.base}; give "
                f"--images a folder that holds all {kind}s, or --image-root {lexical.parent}"
            )
        if not any(map(real.is_relative_to, self._folders)):
            raise ValueError(
                f"names the {kind} {shorten(name)}, a link to {real}, which is outside of "
                f"{self.base}; give --image-root {real.parent}"
            )
        if not exists:
            raise ValueError(
                f"names the {kind} {shorten(name)}, but there is no file {file}; give --images "
                f"the folder of the {kind}s"
            )
        return file


def shorten(name: str) -> str:
    """A name for messages: at most 80 characters, all of them printable."""
    found = name if len(name) <= _SHOWN else f"{name[: _SHOWN - 3]}..."
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in found)


def _decode(url: str) -> bytes:
    """Decode a data URL. Raises ValueError for other encodings than base64."""
    head, comma, body = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ValueError(f"has the data URL {shorten(head)}; give data:image/png;base64,...")
    try:
        found = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"has a data URL that is not base64 ({error})") from error
    if not found:
        raise ValueError("has an empty data URL")
    return found


def download(media: Media) -> None:
    """Download a file of the network, once. Raises ValueError naming the address."""
    assert media.url is not None
    (file,) = media.files
    if file.exists():
        return
    from urllib.request import Request, urlopen

    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        request = Request(media.url, headers={"User-Agent": "mmspec"})
        with urlopen(request, timeout=SECONDS) as answer:
            content = answer.read(MAX_DOWNLOAD_BYTES + 1)
    except Exception as error:  # whatever a server or an address makes of it
        raise ValueError(f"names {media.name}, which cannot be downloaded ({error})") from error
    if len(content) > MAX_DOWNLOAD_BYTES:
        raise ValueError(f"names {media.name}, which has more than {MAX_DOWNLOAD_BYTES >> 20} MiB")
    part.write_bytes(content)
    part.replace(file)
