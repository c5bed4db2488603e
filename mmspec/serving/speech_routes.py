"""The route `/v1/audio/speech`: sound as it is verified, in chunks of a file or in events."""

from __future__ import annotations

import base64
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from time import monotonic
from typing import Any

from mmspec.modalities.common.sound import encode_pcm, make_wav_header
from mmspec.serving.app import Handler
from mmspec.serving.chat import InvalidRequest
from mmspec.serving.limits import MAX_BODY_BYTES
from mmspec.serving.metrics import Metrics
from mmspec.serving.replies import (
    describe_error,
    make_event,
    parse_text,
    parse_whole,
    read_fields,
    run_while_connected,
    stream_chunks,
    stream_events,
)
from mmspec.serving.speech import Piece, Speaker

KNOWN = ("model", "input", "voice", "seed", "response_format", "speed", "stream_format")
CHOICES = {
    "response_format": ("wav", "pcm"),
    "stream_format": ("audio", "sse"),
    "speed": (1, 1.0),
}


@dataclass(frozen=True)
class SpeechRoutes:
    """Speech of one model. `settings` names those that its requests take."""

    name: str
    speaker: Speaker
    settings: frozenset[str]
    metrics: Metrics
    max_bytes: int = MAX_BODY_BYTES

    def handlers(self) -> Mapping[str, Handler]:
        """The handler of speech."""
        return {"/v1/audio/speech": self.speak}

    def close(self) -> None:
        """Finish what was taken."""
        self.speaker.close()

    async def speak(self, request: Any) -> Any:
        """Respond to a request: mono sound of 16 bits as WAV, or its samples alone (`pcm`).

        The response begins with the first samples, so an error before them has its status. Sound
        that comes in one piece is a file of known length; otherwise the header of a WAV has the
        largest length, as it is written before the last sample. Raises InvalidRequest, QueueFull,
        ApiError and TimeoutError.
        """
        from starlette.responses import Response

        start = monotonic()
        body = await read_fields(request, self.max_bytes, self.name, KNOWN, CHOICES)
        settings = {name: body[name] for name in ("voice",) if name in body}
        if missing := sorted(set(settings) - self.settings):
            raise InvalidRequest(f"{self.name} takes no {', '.join(missing)}; drop it")
        text = parse_text(body, "input")
        seed = parse_whole(body, "seed", 0, (1 << 63) - 1, secrets.randbelow(1 << 31))
        pieces = self._observe(self.speaker.run(settings, text, seed), start)
        first = await run_while_connected(request, _take(pieces))
        kind = body.get("response_format", "wav")
        rate_hz = self.speaker.codec.sampling_rate
        if body.get("stream_format") == "sse":
            return stream_events(_make_events(first, pieces, kind, rate_hz))
        media_type = "audio/wav" if kind == "wav" else f"audio/pcm;rate={rate_hz};channels=1"
        if first.usage is None:
            return stream_chunks(_make_chunks(first, pieces, kind, rate_hz), media_type)
        samples = encode_pcm(first.samples)
        head = make_wav_header(rate_hz, len(samples)) if kind == "wav" else b""
        return Response(head + samples, media_type=media_type)

    async def _observe(self, pieces: AsyncIterator[Piece], start: float) -> AsyncIterator[Piece]:
        """The same pieces, from the first samples on; measures when they come."""
        has_sound = False
        async with aclosing(pieces):  # type: ignore[type-var]
            async for piece in pieces:
                if len(piece.samples) and not has_sound:
                    has_sound = True
                    self.metrics.first_audio.observe(monotonic() - start)
                if piece.usage is not None:
                    self.metrics.seconds.observe(monotonic() - start)
                if len(piece.samples) or piece.usage is not None:
                    yield piece


async def _take(pieces: AsyncIterator[Piece]) -> Piece:
    return await anext(pieces)


async def _make_chunks(
    first: Piece, pieces: AsyncIterator[Piece], kind: str, rate_hz: int
) -> AsyncIterator[bytes]:
    """The bytes of a file; an error ends the connection before the end of its body."""
    async with aclosing(pieces):  # type: ignore[type-var]
        yield (make_wav_header(rate_hz) if kind == "wav" else b"") + encode_pcm(first.samples)
        async for piece in pieces:
            yield encode_pcm(piece.samples)


async def _make_events(
    first: Piece, pieces: AsyncIterator[Piece], kind: str, rate_hz: int
) -> AsyncIterator[bytes]:
    """The same bytes as base64 in events, the last of which has the usage, or an error."""
    usage = first.usage

    def make_delta(data: bytes) -> bytes:
        text = base64.b64encode(data).decode()
        return make_event({"type": "speech.audio.delta", "audio": text})

    async with aclosing(pieces):  # type: ignore[type-var]
        try:
            head = make_wav_header(rate_hz) if kind == "wav" else b""
            yield make_delta(head + encode_pcm(first.samples))
            async for piece in pieces:
                usage = piece.usage
                if len(piece.samples):
                    yield make_delta(encode_pcm(piece.samples))
            yield make_event({"type": "speech.audio.done", "usage": usage})
        except Exception as error:  # the status is sent already
            yield make_event(describe_error(error)[1])
