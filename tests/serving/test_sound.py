"""Sound in chat: each request gets the text that it gets alone, and what is none is refused."""

from __future__ import annotations

import threading
from base64 import b64decode, b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from torch import Tensor

from mmspec.cli.models import load_models
from mmspec.cli.serve import make_served
from mmspec.modalities.common.audio_inputs import read_sounds
from mmspec.modalities.common.sound import write
from mmspec.modalities.speech.recordings import recordings
from tests.modalities.speech.recognisers import noise
from tests.serving.test_server import SCENE, Server, data_url, openai, options
from tests.toys import qwen2_audio, qwen_omni

WORDS = "what is heard?"
NEW_TOKENS = 12


def part(data: bytes, kind: str = "wav") -> dict[str, Any]:
    text = b64encode(data).decode()
    return {"type": "input_audio", "input_audio": {"data": text, "format": kind}}


def turn(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": WORDS}]}]


def chat(server: Server, messages: Any, **more: Any) -> Any:
    given = {"temperature": 0, "max_tokens": NEW_TOKENS, **more}
    name = server.client.models.list().data[0].id
    return server.client.chat.completions.create(model=name, messages=messages, **given)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen2_audio.save(tmp_path_factory.mktemp("qwen2-audio"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    loaded = load_models(str(folder), None, None, ["prompt-lookup"])
    made = Server(make_served(loaded, options()))
    yield made
    made.close()


def wav(folder: Path, seconds: float, seed: int, rate_hz: int = 16000) -> bytes:
    return write(folder / f"{seed}.wav", noise(seconds, seed, rate_hz), rate_hz).read_bytes()


def picture() -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url()}}


def generate_alone(model: Any, processor: Any, parts: list[dict[str, Any]]) -> str:
    """The text of transformers' own `generate()`."""
    kinds = {"input_audio": "audio", "image_url": "image"}
    content = [*({"type": kinds[one["type"]]} for one in parts), {"type": "text", "text": WORDS}]
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    files = [b64decode(one["input_audio"]["data"]) for one in parts if "input_audio" in one]
    given: dict[str, Any] = {}
    if files:
        given["audio"] = [one.samples.numpy() for one in read_sounds(processor, files)]
    if len(files) < len(parts):
        given["images"] = [Image.open(SCENE).convert("RGB")]
    made = processor(text=[prompt], **given, return_tensors="pt")
    inputs = {name: value for name, value in made.items() if isinstance(value, Tensor)}
    out = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    new = out[0, inputs["input_ids"].shape[1] :]
    return str(processor.tokenizer.decode(new, skip_special_tokens=True))


def send_at_once(server: Server, requests: list[list[dict[str, Any]]]) -> list[str]:
    found = dict[int, str]()

    def send(index: int) -> None:
        found[index] = chat(server, turn(*requests[index])).choices[0].message.content

    threads = [threading.Thread(target=send, args=(index,)) for index in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[index] for index in range(len(requests))]


def test_sounds_of_several_clients_are_read_as_alone(server: Server, tmp_path: Path) -> None:
    one, two = part(wav(tmp_path, 0.7, 1)), part(wav(tmp_path, 2, 2, 8000))
    requests = [[one], [two], [one, two], []]
    model, processor = qwen2_audio.model(), qwen2_audio.processor()
    expected = [generate_alone(model, processor, parts) for parts in requests]
    assert len(set(expected)) == 4  # the model is not deaf
    assert send_at_once(server, requests) == expected
    chunks = chat(server, turn(two), stream=True)
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == expected[1]


@pytest.mark.slow
def test_a_model_of_images_reads_sound_beside_them(tmp_path: Path) -> None:
    processor = qwen_omni.processor()
    qwen_omni.model().save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    loaded = load_models(str(tmp_path), None, None, ["prompt-lookup"])
    sound = part(wav(tmp_path, 0.3, 5))
    requests = [[sound], [picture()], [sound, picture()], [], [sound]]
    expected = [generate_alone(loaded.model, processor, parts) for parts in requests]
    assert len(set(expected)) == 4
    server = Server(make_served(loaded, options()))
    assert send_at_once(server, requests) == expected
    server.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (part(b"GIF89a"), "the audio: "),
        (part(b""), "0 bytes are not between 1"),
        (part(b"RIFF", "aac"), "input_audio.format='aac' is not known; give one of wav"),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, "input_audio.data=None"),
        ({"type": "input_audio", "input_audio": {"data": "A", "format": "wav"}}, "not base64"),
        ({"type": "audio_url", "audio_url": {"url": "http://a/b.wav"}}, "allow-urls"),
    ],
    ids=["another file", "nothing", "format", "no data", "no base64", "address"],
)
def test_what_is_no_sound_is_refused(server: Server, given: Any, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        chat(server, turn(given))
    assert server.is_idle()


def test_a_sound_that_the_model_would_cut_is_refused(server: Server, tmp_path: Path) -> None:
    """The processor reads the first window alone, without a word."""
    with pytest.raises(openai.BadRequestError, match=r"of 2\.5 s is longer than the 2 s"):
        chat(server, turn(part(wav(tmp_path, 2.5, 3))))
    file = write(tmp_path / "long.wav", noise(2.5), 16000)
    name, transcriptions = (
        server.client.models.list().data[0].id,
        server.client.audio.transcriptions,
    )
    with pytest.raises(openai.BadRequestError, match="longer than the 2 s"):
        transcriptions.create(model=name, file=("long.wav", file.read_bytes()))


def test_a_recording_is_read_only_up_to_a_limit(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmspec.modalities.common.audio_inputs.MAX_SECONDS", 0.5)
    with pytest.raises(openai.BadRequestError, match=r"it is longer than 0\.5 s"):
        chat(server, turn(part(wav(tmp_path, 0.6, 4))))


@pytest.mark.slow
def test_granite_transcribes_in_chat_what_it_transcribes_alone() -> None:
    """The bundled speech model, whose own `generate()` prepares its requests."""
    loaded = load_models("zoo:granite-speech", None, None, ["prompt-lookup"])
    server = Server(make_served(loaded, options()))
    fast = loaded.accelerate("prompt-lookup")
    prompt = "can you transcribe the speech into a written format?"
    for one in recordings()[:3]:
        data = one.path.read_bytes()
        content = [part(data), {"type": "text", "text": prompt}]
        text = chat(server, [{"role": "user", "content": content}], max_tokens=64)
        alone = fast.transcribe(str(one.path), max_new_tokens=64).text
        assert text.choices[0].message.content.strip() == alone
        with one.path.open("rb") as file:
            other = server.client.audio.transcriptions.create(model="zoo:granite-speech", file=file)
        assert alone.startswith(other.text) or other.text.startswith(alone)
    server.close()
