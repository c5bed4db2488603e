"""Routes of models that generate images or speech, or transcribe: one request after the other."""

from __future__ import annotations

import asyncio
import base64
import io
import secrets
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, time
from typing import Any, TypeVar

from mmspec.errors import check_number, format_value, unknown_message
from mmspec.serving.app import Handler
from mmspec.serving.chat import InvalidRequest
from mmspec.serving.limits import MAX_BODY_BYTES, read_body
from mmspec.serving.metrics import Metrics
from mmspec.serving.replies import check_model, parse_body, run_while_connected
from mmspec.serving.worker import SerialQueue

T = TypeVar("T")

MAX_IMAGES = 8
SOUND_TYPES = {"wav": "audio/wav"}
# settings of a request and its prompts, a seed -> the formatter of these settings, the output
Generate = Callable[[Mapping[str, Any], list[str], int], tuple[Any, Any]]


@dataclass(frozen=True)
class MediaRoutes:
    """Routes of one model. `kind` is "images", "speech" or "transcriptions".

    `generate` runs the model with the formatter of commands; `settings` names those that it takes.
    """

    name: str
    kind: str
    generate: Generate
    settings: frozenset[str]
    metrics: Metrics
    queue: SerialQueue = field(default_factory=SerialQueue)
    timeout_s: float = 600
    max_bytes: int = MAX_BODY_BYTES

    def handlers(self) -> Mapping[str, Handler]:
        """The handler of the model's kind."""
        return {
            "images": {"/v1/images/generations": self.make_images},
            "speech": {"/v1/audio/speech": self.speak},
            "transcriptions": {"/v1/audio/transcriptions": self.transcribe},
        }[self.kind]

    def close(self) -> None:
        """Finish what was taken."""
        self.queue.close()

    async def make_images(self, request: Any) -> Any:
        """Respond to `/v1/images/generations` with PNG images."""
        from starlette.responses import JSONResponse

        body = await self._read(
            request,
            ("model", "prompt", "n", "seed", "size", "response_format", "output_format", "user"),
            {"size": ("auto",), "response_format": ("b64_json",), "output_format": ("png",)},
        )
        count = _whole(body, "n", 1, MAX_IMAGES)
        prompts = [_text(body, "prompt")] * count
        _, output = await self._run(request, {}, prompts, body)
        made = [{"b64_json": base64.b64encode(_encode_png(one)).decode()} for one in output.images]
        return JSONResponse({"created": int(time()), "data": made})

    async def speak(self, request: Any) -> Any:
        """Respond to `/v1/audio/speech` with a WAV file."""
        from starlette.responses import Response

        body = await self._read(
            request,
            ("model", "input", "voice", "seed", "response_format", "speed"),
            {"response_format": tuple(SOUND_TYPES), "speed": (1, 1.0)},
        )
        settings = {name: body[name] for name in ("voice",) if name in body}
        formatter, output = await self._run(request, settings, [_text(body, "input")], body)
        return Response(_render(formatter, output, ".wav"), media_type=SOUND_TYPES["wav"])

    async def transcribe(self, request: Any) -> Any:
        """Respond to `/v1/audio/transcriptions`, a form with a file."""
        from starlette.responses import JSONResponse, PlainTextResponse

        form = await _read_form(request, self.max_bytes)
        known = ("file", "model", "prompt", "language", "temperature", "response_format", "seed")
        _check_names(form, known, {"response_format": ("json", "text")})
        check_model(form, self.name)
        sound = form.get("file")
        if not isinstance(sound, bytes) or not sound:
            raise InvalidRequest("file is missing or empty; send a sound file")
        settings = {name: form[name] for name in ("language",) if form.get(name)}
        if "temperature" in form:
            settings["temperature"] = _parse_number("temperature", form["temperature"])
        if "seed" in form:
            form["seed"] = int(_parse_number("seed", form["seed"]))
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "sound.wav"
            file.write_bytes(sound)
            settings["audio"] = str(file)
            prompt = form.get("prompt", "")
            formatter, output = await self._run(request, settings, [prompt], form)
        text = formatter.text(output)
        if form.get("response_format") == "text":
            return PlainTextResponse(text)
        return JSONResponse({"text": text})

    async def _read(
        self, request: Any, known: tuple[str, ...], fixed: Mapping[str, tuple[Any, ...]]
    ) -> dict[str, Any]:
        """The fields of a JSON body. Raises InvalidRequest for others and for other values."""
        body = parse_body(await read_body(request, self.max_bytes))
        if not isinstance(body, Mapping):
            raise InvalidRequest("the body is not a JSON object; send one")
        given = {name: value for name, value in body.items() if value is not None}
        _check_names(given, known, fixed)
        check_model(given, self.name)
        return given

    async def _run(
        self,
        request: Any,
        settings: Mapping[str, Any],
        prompts: list[str],
        given: Mapping[str, Any],
    ) -> tuple[Any, Any]:
        """Run a request in its turn. Raises QueueFull, TimeoutError and InvalidRequest."""
        missing = sorted(set(settings) - self.settings)
        if missing:
            raise InvalidRequest(f"{self.name} takes no {', '.join(missing)}; drop it")
        seed = _whole(given, "seed", 0, (1 << 63) - 1, secrets.randbelow(1 << 31))
        start = monotonic()

        def step() -> tuple[Any, Any]:
            try:
                return self.generate(settings, prompts, seed)
            except ValueError as error:
                raise InvalidRequest(str(error)) from error

        future = asyncio.wrap_future(self.queue.submit(step))

        async def wait() -> tuple[Any, Any]:
            try:
                async with asyncio.timeout(self.timeout_s):
                    return await future
            except TimeoutError:
                raise TimeoutError(f"the request did not end within {self.timeout_s:g} s") from None

        found: tuple[Any, Any] = await run_while_connected(request, wait())
        self.metrics.seconds.observe(monotonic() - start)
        return found


def _check_names(
    given: Mapping[str, Any], known: tuple[str, ...], fixed: Mapping[str, tuple[Any, ...]]
) -> None:
    if unknown := sorted(set(given) - set(known)):
        raise InvalidRequest(unknown_message(unknown, known, "this route"))
    for name, values in fixed.items():
        if name in given and given[name] not in values:
            shown = " or ".join(map(repr, values))
            raise InvalidRequest(
                f"{name}={format_value(given[name])} is not made here; give {shown}"
            )


async def _read_form(request: Any, max_bytes: int) -> dict[str, Any]:
    """The fields of a form, files as bytes. Raises InvalidRequest for another body."""
    from starlette.requests import Request

    body = await read_body(request, max_bytes)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    try:
        form = await Request(request.scope, receive).form()
    except Exception as error:  # a damaged form raises whatever its parser raises
        raise InvalidRequest(
            f"the body is not a form ({error}); send multipart/form-data"
        ) from None
    if "file" not in form:
        raise InvalidRequest("file is missing; send multipart/form-data with a sound file")
    return {
        name: value if isinstance(value, str) else await value.read()
        for name, value in form.items()
    }


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value.strip():
        raise InvalidRequest(f"{name}={format_value(value)} is no text; give one")
    return value


def _whole(given: Mapping[str, Any], name: str, least: int, most: int, default: int = 1) -> int:
    value = given.get(name, default)
    try:
        check_number(name, value, least, most, whole=True)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
    return int(value)


def _parse_number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidRequest(f"{name}={text!r} is not a number; give one") from None


def _encode_png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def _render(formatter: Any, output: Any, ending: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        files: tuple[Path, ...] = formatter.render(output, Path(folder) / f"output{ending}")
        return files[0].read_bytes()
