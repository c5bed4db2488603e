"""Images, speech and transcripts by the official client, one request after the other."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageChops

from mmspec import zoo
from mmspec.cli.models import LoadedModels, load_models
from mmspec.cli.serve import make_served
from mmspec.serving.limits import MAX_BODY_BYTES
from tests.serving.test_server import Server, openai, options, wait_until

RECORDING = Path(zoo.path("llava")).parents[1] / "recordings" / "held-out-01.wav"


@contextmanager
def serve(model: str, modality: str, recipe: str, **changes: Any) -> Iterator[tuple[Any, Any]]:
    loaded: LoadedModels = load_models(model, modality, None, [recipe])
    server = Server(make_served(loaded, options(**changes)))
    try:
        yield server, loaded
    finally:
        server.close()


def test_images_are_those_of_the_model() -> None:
    with serve("zoo:image", "image", "coupled") as (server, loaded):
        given = {"model": "zoo:image", "prompt": "a large red circle", "n": 2}
        made = server.client.images.generate(**given, extra_body={"seed": 4})
        pictures = [Image.open(io.BytesIO(base64.b64decode(one.b64_json))) for one in made.data]
        request = loaded.formatter.request(["a large red circle"] * 2)
        expected = loaded.call(loaded.accelerate("coupled"), request, 4).images
        for one, own in zip(pictures, expected, strict=True):
            assert ImageChops.difference(one.convert("RGB"), own.convert("RGB")).getbbox() is None
        for wrong in ({"n": 99}, {"n": True}, {"size": "1024x1024"}, {"response_format": "url"}):
            with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
                server.client.images.generate(**{**given, **wrong})
        with pytest.raises(openai.NotFoundError):
            server.client.images.generate(model="other", prompt="x")
        with pytest.raises(openai.NotFoundError):
            server.client.chat.completions.create(model="zoo:image", messages=[])


def test_a_queue_of_one_worker_is_limited_and_finished() -> None:
    with serve("zoo:image", "image", "coupled", max_queue=0) as (server, _):
        begin, found = threading.Event(), list[Any]()
        generate = server.routes.generate

        def slow(*given: Any) -> Any:
            begin.wait(20)
            return generate(*given)

        server.routes.__dict__["generate"] = slow
        given = {"model": "zoo:image", "prompt": "a small blue ring"}

        def ask() -> None:
            found.append(server.client.images.generate(**given))

        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(lambda: server.routes.queue.taken)
        with pytest.raises(openai.RateLimitError, match="max_queue=0"):
            server.client.images.generate(**given)
        server.server.should_exit = True
        begin.set()
        thread.join()
        assert found[0].data[0].b64_json


def test_speech_is_a_wav_file() -> None:
    with serve("zoo:codec-lm", "tts", "coupled") as (server, _):
        given = {"model": "zoo:codec-lm", "input": "a red circle", "response_format": "wav"}
        voice = "ada"
        one, two = (
            server.client.audio.speech.create(voice=voice, **given, extra_body={"seed": 1}).content
            for _ in range(2)
        )
        assert one == two
        assert one.startswith(b"RIFF")
        for wrong, message in (
            ({"voice": "nobody"}, "nobody"),
            ({"voice": voice, "response_format": "mp3"}, "mp3"),
            ({"voice": voice, "input": " "}, "input"),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                server.client.audio.speech.create(**{**given, **wrong})


def test_a_recording_is_transcribed() -> None:
    with serve("zoo:whisper", "asr", "coupled") as (server, _):
        read = {"model": "zoo:whisper", "file": RECORDING.read_bytes(), "temperature": 0}
        text = server.client.audio.transcriptions.create(**read).text
        assert len(text.split()) > 3
        plain = server.client.audio.transcriptions.create(**read, response_format="text")
        assert plain.strip().strip('"') == text
        cases: Any = (
            ({"file": b"no sound"}, "sound|audio|WAV"),
            ({"temperature": "hot"}, "hot"),
            ({"temperature": "nan"}, "temperature=nan"),
            *(({"extra_body": {"seed": one}}, f"seed='{one}'") for one in ("1.5", "nan", "true")),
            ({"response_format": "srt"}, "srt"),
        )
        for wrong, message in cases:
            with pytest.raises(openai.BadRequestError, match=message):
                server.client.audio.transcriptions.create(**{**read, **wrong})
        assert json.loads(server.get("/health"))["model"] == "zoo:whisper"
        assert server.routes.max_bytes == MAX_BODY_BYTES
