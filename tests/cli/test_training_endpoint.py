"""`mmspec train --endpoint`: the answers of a server of the target are those of the target."""

from __future__ import annotations

import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mmspec import registry, zoo
from mmspec.cli.training_endpoint import EndpointCollector
from mmspec.cli.training_examples import ResponseCollector, ResponseOptions
from mmspec.training.conversations import Question, read_questions
from mmspec.training.endpoint import ChatEndpoint
from mmspec.training.responses import Response, collect_responses
from tests.cli.running import fail, run
from tests.toys.chat_server import chat_server, completion


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from PIL import Image

    from mmspec.zoo.scene import sample
    from mmspec.zoo.scene_tensors import render_pixels

    folder = tmp_path_factory.mktemp("data")
    for number in range(5):
        Image.fromarray(render_pixels(sample(number))).save(folder / f"{number}.png")
    rows: list[Any] = [{"prompt": f"how many are {n}?", "image": f"{n}.png"} for n in range(5)]
    rows += [{"prompt": text} for text in ("what is at the top?", "is it red?", "describe it.")]
    (folder / "asked.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


OPTIONS = ResponseOptions(False, 12, 2048, 0.0, 0)


def command(data: Path, out: Path, *more: str) -> list[str]:
    asked = ["train", "eagle-2", "--target", "zoo:llava", "--data", str(data / "asked.jsonl")]
    asked += ["--out", str(out), "--steps", "1", "--batch", "4", "--held-out", "1"]
    return [*asked, "--max-new-tokens", "12", *more]


@pytest.fixture(scope="module")
def teacher() -> Any:
    owner = registry.find_modality("zoo:llava")
    return registry.training_data(owner).teacher("zoo:llava", zoo.load("llava"))


@pytest.fixture(scope="module")
def questions(data: Path) -> list[Question]:
    return read_questions(data / "asked.jsonl")


@pytest.fixture(scope="module")
def own(questions: Any, teacher: Any, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of the target's own answers."""
    file = tmp_path_factory.mktemp("own") / "answers.jsonl"
    answer = ResponseCollector(teacher.model, teacher, OPTIONS)
    collect_responses(file, questions, partial(map, answer), 16)
    return file.read_bytes()


def collect(
    folder: Path, questions: Any, teacher: Any, url: str, concurrency: int = 8
) -> list[Response]:
    """All answers of a server."""
    endpoint = ChatEndpoint(url, tries=2, pause_s=0.01)
    made = EndpointCollector(endpoint, teacher, OPTIONS, concurrency)
    return collect_responses(folder / "answers.jsonl", questions, made, 1)


class Server:
    """Returns the target's answers by question, as text."""

    def __init__(self, data: Path, answers: bytes) -> None:
        tokenizer = zoo.processor("llava").tokenizer
        rows = [json.loads(one) for one in (data / "asked.jsonl").open()]
        self.replies: dict[str, Any] = {}
        self.bodies: list[Any] = []
        self.at_once, self.most, self.lock = 0, 0, threading.Lock()
        for row, line in zip(rows, answers.splitlines(), strict=True):
            tokens = json.loads(line)["tokens"]
            is_cut = tokens[-1] != tokenizer.eos_token_id
            text = tokenizer.decode(tokens if is_cut else tokens[:-1])
            reply = completion(text, len(tokens), "length" if is_cut else "stop")
            reply["usage"]["prompt_tokens"] = json.loads(line)["prompt"]
            self.replies[row["prompt"]] = reply

    def text(self, body: Any) -> str:
        content = body["messages"][-1]["content"]
        return content if isinstance(content, str) else str(content[-1]["text"])

    def __call__(self, body: Any, _: Any) -> Any:
        with self.lock:
            self.bodies.append(body)
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        threading.Event().wait(0.02)
        with self.lock:
            self.at_once -= 1
        return self.replies[self.text(body)]


@pytest.fixture
def server(data: Path, own: bytes) -> Server:
    return Server(data, own)


def test_the_answers_are_those_of_the_target(
    data: Path, own: bytes, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Token for token, with images as data URLs, and not more requests at once than allowed."""
    with chat_server(server) as url:
        run(capsys, *command(data, tmp_path, "--endpoint", url, "--concurrency", "3"))
    assert (tmp_path / "answers.jsonl").read_bytes() == own
    assert len(server.bodies) == 8
    assert server.most == 3
    pictures = json.dumps(server.bodies).count("data:image/png;base64,")
    assert pictures == 5
    assert {(one["max_tokens"], one["temperature"]) for one in server.bodies} == {(12, 0.0)}
    assert sorted(one["seed"] for one in server.bodies) == [*range(8)]


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (b"<html>", "which is no chat completion; give --endpoint"),
        (500, "gave no answer in 2 tries"),
    ],
)
def test_an_error_loses_no_answer_that_has_arrived(
    own: bytes,
    server: Server,
    questions: Any,
    teacher: Any,
    reply: Any,
    said: str,
    tmp_path: Path,
) -> None:
    good, broken = dict(server.replies), "is it red?"
    server.replies[broken] = reply
    with chat_server(server) as url:
        with pytest.raises((ValueError, ConnectionError), match=said) as caught:
            collect(tmp_path, questions, teacher, url, 2)
        assert "repeat the command: it resumes" in str(caught.value)
        there = {json.loads(one)["question"] for one in (tmp_path / "answers.jsonl").open()}
        assert there >= {0, 1, 2, 3, 4}
        assert 6 not in there
        server.replies, server.bodies = good, []
        collect(tmp_path, questions, teacher, url)
    assert len(server.bodies) == 8 - len(there)
    assert (tmp_path / "answers.jsonl").read_bytes() == own


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (completion("Bonjour, le monde!"), "is not made of the target's tokens; give --endpoint"),
        (completion("a red circle", 40), "an answer of 40 tokens has 4 of the target's"),
        (completion("", 1, "content_filter"), "ended an answer by 'content_filter'"),
        (400, "refuses the request: 400"),
    ],
)
def test_a_server_of_another_model_is_refused_at_the_first_answer(
    server: Server, questions: Any, teacher: Any, reply: Any, said: str, tmp_path: Path
) -> None:
    good = dict(server.replies)
    server.replies = dict.fromkeys(good, reply)
    with chat_server(server) as url:
        with pytest.raises(ValueError, match=f"asked.jsonl:1 has no answer: .*{said}"):
            collect(tmp_path, questions, teacher, url)
        assert len(server.bodies) == 1
        assert not (tmp_path / "answers.jsonl").read_bytes()
        server.replies = good | {"is it red?": reply}  # later ones are left out
        found = collect(tmp_path, questions, teacher, url)
    (left_out,) = (one.skipped for one in found if one.skipped is not None)
    assert said in left_out


def test_other_prompts_are_reported(
    server: Server,
    questions: Any,
    teacher: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for one in server.replies.values():
        one["usage"]["prompt_tokens"] += 7
    with chat_server(server) as url:
        collect(tmp_path, questions, teacher, url)
    said = capsys.readouterr().err
    assert said.count("its chat template or its image sizes differ") == 1


def test_options_that_contradict_are_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = command(data, tmp_path / "new", "--endpoint", "http://127.0.0.1:9/v1")
    assert "drop one of them" in fail(capsys, *given, "--answers", "data")[1]
    assert "is not an http(s) address" in fail(capsys, *given, "--endpoint", "nowhere")[1]
    assert not (tmp_path / "new").exists()
