"""Routes of models that generate images, or transcribe: one request after the other."""

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

from mmspec.serving.app import Handler
from mmspec.serving.chat import InvalidRequest
from mmspec.serving.limits import MAX_BODY_BYTES, read_body
from mmspec.serving.metrics import Metrics
from mmspec.serving.replies import (
    check_model,
    check_names,
    parse_text,
    parse_whole,
    read_fields,
    run_while_connected,
)
from mmspec.serving.worker import SerialQueue

T = TypeVar("T")

MAX_IMAGES = 8
IMAGE_FIELDS = (
    *("model", "prompt", "n", "seed", "size", "response_format", "output_format", "user"),
)
IMAGE_CHOICES = {"size": ("auto",), "response_format": ("b64_json",), "output_format": ("png",)}
# settings of a request and its prompts, a seed -> the formatter of these settings, the output
Generate = Callable[[Mapping[str, Any], list[str], int], tuple[Any, Any]]


@dataclass(frozen=True)
class MediaRoutes:
    """Routes of one model. `kind` is "images" or "transcriptions".

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
            "transcriptions": {"/v1/audio/transcriptions": self.transcribe},
        }[self.kind]

    def close(self) -> None:
        """Finish what was taken."""
        self.queue.close()

    async def make_images(self, request: Any) -> Any:
        """Respond to `/v1/images/generations` with PNG images."""
        from starlette.responses import JSONResponse

        body = await read_fields(request, self.max_bytes, self.name, IMAGE_FIELDS, IMAGE_CHOICES)
        count = parse_whole(body, "n", 1, MAX_IMAGES)
        prompts = [parse_text(body, "prompt")] * count
        _, output = await self._run(request, {}, prompts, body)
        made = [{"b64_json": base64.b64encode(_encode_png(one)).decode()} for one in output.images]
        return JSONResponse({"created": int(time()), "data": made})

    async def transcribe(self, request: Any) -> Any:
        """Respond to `/v1/audio/transcriptions`, a form with a file."""
        from starlette.responses import JSONResponse, PlainTextResponse

        form = await _read_form(request, self.max_bytes)
        known = ("file", "model", "prompt", "language", "temperature", "response_format", "seed")
        check_names(form, known, {"response_format": ("json", "text")})
        check_model(form, self.name)
        sound = form.get("file")
        if not isinstance(sound, bytes) or not sound:
            raise InvalidRequest("file is missing or empty; send a sound file")
        settings = {name: form[name] for name in ("language",) if form.get(name)}
        if "temperature" in form:
            settings["temperature"] = _parse_number("temperature", form["temperature"], float)
        if "seed" in form:
            form["seed"] = _parse_number("seed", form["seed"], int)
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
        seed = parse_whole(given, "seed", 0, (1 << 63) - 1, secrets.randbelow(1 << 31))
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


def _parse_number(name: str, text: str, kind: Callable[[str], T]) -> T:
    try:
        return kind(text)
    except ValueError:
        noun = "whole number" if kind is int else "number"
        raise InvalidRequest(f"{name}={text!r} is not a {noun}; give one") from None


def _encode_png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
