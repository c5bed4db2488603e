"""Media of requests: data URLs, and network addresses where the server allows them."""

from __future__ import annotations

import base64
import binascii
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

MAX_MEDIA_BYTES = 32 << 20
MAX_FETCH_S = 10.0

Fetch = Callable[[str], bytes]


def read_url(where: str, url: Any, fetch: Fetch | None) -> bytes:
    """Read a data URL, or a network address by `fetch`.

    Raises ValueError for anything else, and for more than `MAX_MEDIA_BYTES`.
    """
    if not isinstance(url, str):
        raise ValueError(f"{where} has no url; give a data URL: data:image/png;base64,...")
    if not url.startswith("data:"):
        if fetch is None or urlsplit(url).scheme not in ("http", "https"):
            raise ValueError(
                f"{where}: {url[:60]!r} is not a data URL, and this server reads no others; send "
                "the bytes: data:image/png;base64,... (or start it with --allow-urls)"
            )
        return check_size(where, fetch(url))
    head, comma, body = url.partition(",")
    if not comma:
        raise ValueError(f"{where}: the data URL has no data; give data:image/png;base64,...")
    try:
        is_encoded = head.endswith(";base64")
        data = base64.b64decode(body, validate=True) if is_encoded else unquote_to_bytes(body)
    except (binascii.Error, ValueError) as error:
        raise ValueError(
            f"{where}: the data URL is not base64 ({error}); encode it again"
        ) from None
    return check_size(where, data)


def check_size(where: str, data: bytes) -> bytes:
    """The bytes themselves. Raises ValueError for none, and for too many."""
    if not data or len(data) > MAX_MEDIA_BYTES:
        raise ValueError(
            f"{where}: {len(data)} bytes are not between 1 and {MAX_MEDIA_BYTES}; send less"
        )
    return data


def fetch_url(url: str) -> bytes:
    """Read a network address. Raises ValueError where it cannot be read in time."""
    try:
        with urllib.request.urlopen(url, timeout=MAX_FETCH_S) as reply:
            found: bytes = reply.read(MAX_MEDIA_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ValueError(f"{url[:60]} cannot be read: {error}") from error
    return found
