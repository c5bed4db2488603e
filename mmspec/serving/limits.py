"""What every web service of ours limits: who may call, the size and time of a body, connections."""

from __future__ import annotations

import asyncio
import ctypes
import secrets
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

MAX_BODY_BYTES = 64 << 20  # of a request: five minutes of features, or some pictures
MAX_READ_S = 30.0  # of one request
MAX_WRITE_S = 30.0  # until a client takes what was sent
MAX_CONNECTIONS = 256  # at a time
MIN_TOKEN_LENGTH = 16
MAX_ARENAS = 2
_M_ARENA_MAX = -8  # of `mallopt`, in malloc.h of glibc


class BodyRefused(ValueError):
    """A body that is too large (413), or does not come in time or in full (408)."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def limit_arenas() -> None:
    """Let all threads of this process share `MAX_ARENAS` heaps of the C allocator, where it can.

    glibc makes up to eight per processor, and each keeps what the largest request of any of its
    threads needed. Call it before threads are started.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(_M_ARENA_MAX, MAX_ARENAS)


def check_token(token: Any) -> None:
    """Check a secret. Raises ValueError for a short one and for one that no header can carry."""
    is_text = isinstance(token, str) and token.isascii() and token.isprintable()
    if not is_text or " " in token or len(token) < MIN_TOKEN_LENGTH:
        what = f"of {len(token)} characters" if isinstance(token, str) else f"{token!r}"
        raise ValueError(
            f"a token {what} is not {MIN_TOKEN_LENGTH} or more ASCII characters without spaces; "
            "give one such as secrets.token_urlsafe()"
        )


def is_authorised(request: Any, token: str) -> bool:
    """Whether a request has the token in its `Authorization` header."""
    given = request.headers.get("authorization", "").encode()
    return secrets.compare_digest(given, f"Bearer {token}".encode())


async def read_body(request: Any, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Read the body of a request. Raises BodyRefused."""
    from starlette.requests import ClientDisconnect

    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > max_bytes:
                raise BodyRefused(f"the body has more than {max_bytes} bytes; send less", 413)
    except ClientDisconnect:
        raise BodyRefused("the connection ended before the body", 408) from None
    return bytes(body)


async def within(step: Awaitable[T], seconds: float) -> T:
    """Await something for at most so long. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        return await step


def create_server(app: Any, host: str, port: int) -> Any:
    """Make the uvicorn server of an application.

    A connection carries one request, and is aborted unless that is read within `MAX_READ_S`. A
    server that is told to stop finishes the requests that it has taken.
    """
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Connection(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.loop.call_later(MAX_READ_S, self.abort_unless_read)

        def abort_unless_read(self) -> None:
            if self.cycle is None or self.cycle.more_body:
                self.transport.abort()

    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=Connection,
        headers=[("connection", "close")],
        limit_concurrency=MAX_CONNECTIONS,
        log_level="warning",
    )
    return uvicorn.Server(config)
