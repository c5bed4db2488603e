"""Speech in chunks and in events, by the official client: the sound of the whole decode, early."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import struct
import threading
import time
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mmspec.cli.models import LoadedModels, load_models
from mmspec.cli.serve import make_served
from mmspec.modalities.common.sound import encode_pcm
from mmspec.modalities.speech.speech_loop import SpeechStream
from mmspec.serving.speech import EngineSpeaker, Mailbox, SerialSpeaker
from mmspec.serving.worker import SerialQueue
from tests.serving.test_server import Server, openai, options, wait_until

MODEL, TEXTS = "zoo:codec-lm", ("a red circle", "a blue square", "a large green ring")


@contextmanager
def serve(loaded: LoadedModels, **changes: Any) -> Iterator[Server]:
    made = Server(make_served(loaded, options(**changes)))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def loaded() -> LoadedModels:
    overrides = ["codec=streaming-codec", "length=1"]
    return load_models(MODEL, "tts", None, ["coupled"], overrides=overrides, max_new_tokens=40)


@pytest.fixture(scope="module")
def server(loaded: LoadedModels) -> Iterator[Server]:
    with serve(loaded) as made:
        yield made


@pytest.fixture(scope="module")
def fast(loaded: LoadedModels) -> Any:
    return loaded.accelerate("coupled")


def ask(text: str = TEXTS[0], kind: str = "pcm", seed: int = 3, **more: Any) -> dict[str, Any]:
    given = {"model": MODEL, "input": text, "voice": "ada", "response_format": kind}
    return {**given, "extra_body": {"seed": seed}, **more}


def stream(server: Server, **request: Any) -> tuple[list[bytes], Any]:
    speech = server.client.audio.speech.with_streaming_response
    with speech.create(**request) as response:
        return [*response.iter_bytes()], response.headers


def alone(fast: Any, text: str = TEXTS[0], seed: int = 3) -> Any:
    return fast.synthesize(text, voice="ada", seed=seed, max_new_tokens=40)


def check_same(data: bytes, output: Any) -> None:
    """The samples of the whole decode, up to rounding to integers."""
    mine, whole = (np.frombuffer(one, "<i2").astype(int) for one in (data, whole_pcm(output)))
    assert len(mine) == len(whole) > 1000
    assert abs(mine - whole).max() <= 1


def whole_pcm(output: Any) -> bytes:
    return encode_pcm(output.waveform)


def test_samples_come_as_they_are_verified(server: Server, fast: Any) -> None:
    chunks, headers = stream(server, **ask())
    output = alone(fast)
    check_same(b"".join(chunks), output)
    assert len(chunks) > 10
    assert len(chunks[0]) < len(b"".join(chunks)) / 10
    assert headers["content-type"] == "audio/pcm;rate=16000;channels=1"
    assert headers["transfer-encoding"] == "chunked"
    assert server.routes.speaker.engine.counters.drafted > 0


def test_a_wav_of_unknown_length_can_be_read(server: Server, fast: Any) -> None:
    chunks, headers = stream(server, **ask(kind="wav"))
    data = b"".join(chunks)
    assert headers["content-type"] == "audio/wav"
    assert struct.unpack("<I", data[40:44]) == (0xFFFFFFFF,)
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (16000, 1, 2)
        check_same(file.readframes(1 << 24), alone(fast))
    check_same(server.client.audio.speech.create(**ask(kind="wav")).content[44:], alone(fast))


def read_events(server: Server, **request: Any) -> list[dict[str, Any]]:
    speech = server.client.audio.speech.with_streaming_response
    with speech.create(**request, stream_format="sse") as response:
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_events_hold_the_same_bytes_and_the_usage(server: Server, fast: Any) -> None:
    *deltas, done = read_events(server, **ask())
    assert {one["type"] for one in deltas} == {"speech.audio.delta"}
    assert len(deltas) > 10
    output = alone(fast)
    check_same(b"".join(base64.b64decode(one["audio"]) for one in deltas), output)
    new = output.stats.num_new_tokens
    assert done["type"] == "speech.audio.done"
    assert done["usage"]["output_tokens"] == new
    assert done["usage"]["input_tokens"] == output.prompt_tokens == 5
    assert done["usage"]["total_tokens"] == new + 5
    assert base64.b64decode(read_events(server, **ask(kind="wav"))[0]["audio"])[:4] == b"RIFF"


def test_several_clients_get_the_speech_that_they_get_alone(
    loaded: LoadedModels, fast: Any
) -> None:
    with serve(loaded) as server:
        found, engine = dict[int, bytes](), server.routes.speaker.engine

        def speak(index: int) -> None:
            found[index] = b"".join(stream(server, **ask(TEXTS[index], seed=index))[0])

        threads = [threading.Thread(target=speak, args=(index,)) for index in range(len(TEXTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for index, text in enumerate(TEXTS):
            check_same(found[index], alone(fast, text, index))
        assert engine.counters.completed == len(TEXTS)
        assert engine.counters.row_rounds > engine.counters.rounds
        given = {"text": TEXTS[0], "voice": "ada", "max_new_tokens": 40, "seed": 0}
        tokens, first = engine.submit(given).result().tokens, fast.session.layout.first
        codes = alone(fast, TEXTS[0], 0).codes[0][0]
        assert [one - first for one in tokens][: len(codes)] == codes.tolist()
        metrics = server.get("/metrics")
        assert f"mmspec_first_audio_seconds_count {len(TEXTS)}.0" in metrics
        assert f"mmspec_request_seconds_count {len(TEXTS)}.0" in metrics


def test_a_client_that_goes_away_cancels_its_speech(
    loaded: LoadedModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = Mailbox.put

    def slow(self: Mailbox, item: Any) -> None:  # in the thread of the engine
        put(self, item)
        time.sleep(0.03)

    monkeypatch.setattr(Mailbox, "put", slow)
    with serve(loaded, max_requests=1, max_queue=0) as server:
        engine = server.routes.speaker.engine
        speech = server.client.audio.speech.with_streaming_response
        with speech.create(**ask()) as response:
            chunks = response.iter_bytes()
            next(chunks)
            with pytest.raises(openai.RateLimitError, match="max_queue=0"):
                server.client.audio.speech.create(**ask())
        wait_until(lambda: not engine.num_running)
        assert (engine.counters.cancelled, engine.counters.completed) == (1, 0)
        assert server.client.audio.speech.create(**ask()).content


@pytest.mark.parametrize(
    "wrong",
    [
        {"voice": "nobody"},
        {"response_format": "mp3"},
        {"stream_format": "chunks"},
        {"speed": 2},
        {"speed": True},
        {"input": " "},
        {"instructions": "softly"},
        {"extra_body": {"seed": -1}},
    ],
    ids=lambda value: next(iter(value)),
)
def test_errors_before_the_first_sound_have_a_status(server: Server, wrong: Any) -> None:
    (name,) = wrong
    with pytest.raises(openai.BadRequestError, match="seed" if name == "extra_body" else name):
        stream(server, **{**ask(), **wrong})


def test_late_speech_is_504(loaded: LoadedModels) -> None:
    with serve(loaded, timeout_s=1e-6) as server:  # passed before its prompt is read
        with pytest.raises(openai.APIStatusError, match="in time") as caught:
            stream(server, **ask())
        assert caught.value.status_code == 504


def test_errors_after_the_first_sound_end_the_stream(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event, or a body that ends before its last chunk."""
    extend = SpeechStream.extend

    def fail(self: SpeechStream, tokens: Any) -> Any:
        if len(self.stream.samples):
            raise RuntimeError("broken")
        return extend(self, tokens)

    monkeypatch.setattr(SpeechStream, "extend", fail)
    first, error = read_events(server, **ask())
    assert first["type"] == "speech.audio.delta"
    assert error["error"]["code"] == "server_error"
    with pytest.raises(Exception, match="incomplete chunked read"):
        stream(server, **ask())
    wait_until(lambda: not server.routes.speaker.engine.num_running)


def test_a_codec_of_whole_utterances_responds_in_one_piece() -> None:
    loaded = load_models(MODEL, "tts", None, ["coupled"], max_new_tokens=40)
    fast = loaded.accelerate("coupled")
    with serve(loaded) as server:
        assert isinstance(server.routes.speaker, EngineSpeaker)
        chunks, headers = stream(server, **ask(kind="wav"))
        data = b"".join(chunks)
        assert int(headers["content-length"]) == len(data)
        assert struct.unpack("<I", data[4:8]) == (len(data) - 8,)
        with wave.open(io.BytesIO(data)) as file:
            assert 44 + 2 * file.getnframes() == len(data)
        check_same(data[44:], alone(fast))
        delta, done = read_events(server, **ask())
        check_same(base64.b64decode(delta["audio"]), alone(fast))
        assert done["type"] == "speech.audio.done"


def test_models_that_decode_each_request_alone_stream_too(tmp_path: Path) -> None:
    from transformers import EncodecFeatureExtractor

    from mmspec.modalities.speech.frames import tiny_models
    from tests.toys import speech_models

    tiny_models.musicgen().save_pretrained(tmp_path)
    EncodecFeatureExtractor(sampling_rate=1000).save_pretrained(tmp_path)
    speech_models.words().save_pretrained(tmp_path)
    loaded = load_models(str(tmp_path), None, None, ["frame-lookup"], seconds=0.4)
    with serve(loaded) as server:
        assert isinstance(server.routes.speaker, SerialSpeaker)
        given = {**ask(), "model": str(tmp_path), "voice": openai.NOT_GIVEN}
        chunks, _ = stream(server, **given)
        output = loaded.call(
            loaded.accelerate("frame-lookup"), loaded.formatter.request([TEXTS[0]]), 3
        )
        mine, whole = (
            np.frombuffer(one, "<i2").astype(int) for one in (b"".join(chunks), whole_pcm(output))
        )
        assert len(mine) == len(whole) > 0
        assert abs(mine - whole).max() <= 1
        assert len(chunks) > 1
        with pytest.raises(openai.BadRequestError, match="voice"):
            stream(server, **{**given, "voice": "eve"})


def test_a_run_that_nobody_listens_to_ends() -> None:
    """Of a model that decodes each request alone; and one that takes too long."""
    rounds = list[int]()
    codec, begun, queue = SimpleNamespace(streams=True), threading.Event(), SerialQueue()

    def synthesize(request: Any) -> Any:
        for count in range(1, 2000):
            rounds.append(count)
            request["on_round"](SimpleNamespace(partial=lambda n=count: [torch.zeros(n)]))
            begun.wait(0.005)

    def make_request(settings: Any, text: str) -> dict[str, Any]:
        return {"text": text}

    async def leave(timeout_s: float) -> None:
        speaker = SerialSpeaker(synthesize, make_request, codec, queue, timeout_s)
        pieces: Any = speaker.run({}, "a", 0)
        async for piece in pieces:
            if timeout_s > 1 and len(rounds) > 3:
                assert len(piece.samples)
                break
        await pieces.aclose()

    async def leave_both() -> None:
        await leave(10)
        with pytest.raises(TimeoutError, match=r"0\.05 s"):
            await leave(0.05)
        await asyncio.to_thread(queue.close)  # while the loop goes on, as that of a server does

    asyncio.run(leave_both())
    assert len(rounds) < 1000


def test_what_no_round_could_decode_is_sent_at_the_end_of_a_run() -> None:
    """Of a codec of whole utterances, and a model that decodes each request alone."""
    whole, queue = torch.arange(5.0), SerialQueue()

    def synthesize(request: Any) -> Any:
        request["on_round"](SimpleNamespace(partial=lambda: pytest.fail("it cannot decode these")))
        stats = SimpleNamespace(num_new_tokens=3)
        return SimpleNamespace(waveform=whole, prompt_tokens=2, stats=stats)

    async def collect() -> list[Any]:
        codec: Any = SimpleNamespace(streams=False)
        speaker = SerialSpeaker(synthesize, lambda _, text: {"text": text}, codec, queue, 10)
        return [piece async for piece in speaker.run({}, "a", 0)]

    pieces = asyncio.run(collect())
    queue.close()
    assert torch.equal(torch.cat([piece.samples for piece in pieces]), whole)
    assert pieces[-1].usage == {"input_tokens": 2, "output_tokens": 3, "total_tokens": 5}
