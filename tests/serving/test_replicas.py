"""Replicas by Ray Serve: responses, a replica lost in mid-request, other files on disk."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from mmspec import zoo
from mmspec.cli.options import ModelOptions
from mmspec.cli.serve import ServerOptions, _find_resources, make_app
from mmspec.serving.model_files import check_same_files, digest_files
from mmspec.serving.replicas import Replicas, _pass_on, build_application, check_resources

TOKEN, PORT = "a-token-that-is-long-enough", 18437
PROMPT = [{"role": "user", "content": "describe the picture"}]
SETTINGS: dict[str, Any] = {"messages": PROMPT, "max_tokens": 12}
DRAFTER = "zoo:llava-drafter"
OPTIONS = ModelOptions(drafter=DRAFTER, recipe=["coupled"], command="serve")
SERVER = ServerOptions("127.0.0.1", PORT, TOKEN, 4, None, 8, 64, 60.0, False)


class Dying:
    """An application whose process ends once per file of a folder, by the name of that file.

    "before" ends it when a request has come, "within" after the first part of a response was sent.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.app = make_app(replace(OPTIONS, model=str(self.folder / "model")), SERVER)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.take("before")

        async def send_some(message: Any) -> None:
            await send(message)
            if message.get("body") and (self.folder / "within").exists():
                await asyncio.sleep(1)
                self.take("within")

        try:
            await self.app(scope, receive, send_some)
        except asyncio.CancelledError:
            (self.folder / "cancelled").touch()
            raise

    def take(self, name: str) -> None:
        try:
            (self.folder / name).unlink()
        except FileNotFoundError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    ray = pytest.importorskip("ray")
    serve = pytest.importorskip("ray.serve")
    folder = tmp_path_factory.mktemp("deployed")
    models = [str(shutil.copytree(zoo.path("llava"), folder / "model")), DRAFTER]
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    ray.init(
        num_cpus=2,
        object_store_memory=100 << 20,
        include_dashboard=False,
        runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}},
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        limits = Replicas(2, 16, 8, 60.0, TOKEN)
        serve.run(build_application(partial(Dying, str(folder)), models, limits), name="test")
        yield folder
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture(scope="module")
def client(deployed: Path) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key=TOKEN, max_retries=0)


def ask(client: Any, **settings: Any) -> str:
    given = {"model": None, "temperature": 0, **SETTINGS, **settings}
    made = client.chat.completions.create(**given)
    return str(made.choices[0].message.content)


def stream(client: Any, **settings: Any) -> Iterator[str]:
    given = {"model": None, "temperature": 0, **SETTINGS, **settings, "stream": True}
    for chunk in client.chat.completions.create(**given):
        yield chunk.choices[0].delta.content or ""


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_replicas_respond_as_one_server(client: Any) -> None:
    import openai

    expected = ask(client)
    assert expected
    assert "".join(stream(client)) == expected
    assert {ask(client) for _ in range(6)} == {expected}
    seeded = {"temperature": 1.5, "seed": 4}
    assert len({ask(client, **seeded) for _ in range(6)}) == 1  # noise is that of the seed
    assert [Path(one.id).name for one in client.models.list().data] == ["model"]
    with pytest.raises(openai.BadRequestError, match="frequency_penalty"):
        ask(client, frequency_penalty=1.0)
    with pytest.raises(openai.AuthenticationError):
        ask(client.with_options(api_key="another-token-that-is-long"))


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_request_of_a_lost_replica_runs_again(client: Any, deployed: Path) -> None:
    expected = ask(client)
    (deployed / "before").touch()
    assert ask(client) == expected
    assert not (deployed / "before").exists()
    (deployed / "within").touch()  # a response that is not a stream is whole, or not sent
    assert ask(client) == expected
    assert not (deployed / "within").exists()


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_stream_of_a_lost_replica_ends_with_one_error(client: Any, deployed: Path) -> None:
    import openai

    expected = ask(client)
    (deployed / "within").touch()
    parts = list[str]()
    with pytest.raises(openai.APIError, match="replica of this stream was lost; send it again"):
        parts.extend(stream(client))
    assert parts  # what came before is not sent again
    assert expected.startswith("".join(parts))
    (deployed / "before").touch()
    assert "".join(stream(client)) == expected


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_client_that_goes_away_cancels_its_request(client: Any, deployed: Path) -> None:
    given = {"model": None, **SETTINGS, "max_tokens": 400, "extra_body": {"min_new_tokens": 400}}
    with client.chat.completions.create(**given, stream=True) as chunks:
        next(chunks)
    wait_until((deployed / "cancelled").exists)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_replica_that_finds_another_model_does_not_start(client: Any, deployed: Path) -> None:
    from ray import serve

    expected = ask(client)
    change_one_bit(deployed / "model" / "model.safetensors")
    (deployed / "before").touch()
    assert ask(client) == expected

    def is_refused() -> bool:
        deployments = serve.status().applications["test"].deployments
        return "model.safetensors changed; deploy again" in deployments["Replica"].message

    wait_until(is_refused)
    assert {ask(client) for _ in range(4)} == {expected}  # of the replica that is left


@pytest.mark.parametrize(("kind", "ends"), [("text/event-stream", True), ("audio/pcm", False)])
def test_the_loss_of_a_replica_ends_a_stream(
    kind: str, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an event, or before the last chunk: no file looks complete."""
    lost = type("RayActorError", (Exception,), {})
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    errors = SimpleNamespace(RayActorError=lost)
    monkeypatch.setitem(sys.modules, "ray.exceptions", cast(ModuleType, errors))
    found = list[bytes]()

    async def respond() -> AsyncIterator[dict[str, Any]]:
        yield {"body": b"two"}
        raise lost

    async def read() -> None:
        async for chunk in _pass_on(respond(), {"body": b"one"}, kind):
            found.append(chunk)

    with nullcontext() if ends else pytest.raises(lost):
        asyncio.run(read())
    assert found[:2] == [b"one", b"two"]
    assert (b"replica_lost" in b"".join(found)) == ends


def wait_until(holds: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


def change_one_bit(weights: Path) -> None:
    """Change one weight; the size and the header of the file stay."""
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)


def test_other_files_are_refused(tmp_path: Path) -> None:
    shutil.copytree(zoo.path("llava"), tmp_path / "model")
    name = str(tmp_path / "model")
    deployed = digest_files(name)
    assert deployed == digest_files("zoo:llava")
    check_same_files(name, deployed)
    weights = tmp_path / "model" / "model.safetensors"
    change_one_bit(weights)
    with pytest.raises(ValueError, match=r"another model .* model\.safetensors changed"):
        check_same_files(name, deployed)
    weights.unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors changed; deploy again"):
        check_same_files(name, deployed)


def test_a_gpu_of_every_replica_is_the_one_that_ray_lends() -> None:
    assert _find_resources(ModelOptions(device="cuda", threads=4)) == {"num_cpus": 4, "num_gpus": 1}
    with pytest.raises(ValueError, match="device cuda:1 cannot be that of every replica"):
        _find_resources(ModelOptions(device="cuda:1"))
    with pytest.raises(ValueError, match="--device-map auto cannot"):
        _find_resources(ModelOptions(device_map="auto"))


def test_replicas_beyond_the_cluster_are_refused() -> None:
    given = Replicas(2, resources={"num_cpus": 1, "num_gpus": 1})
    check_resources(given, {"CPU": 2, "GPU": 2})
    with pytest.raises(ValueError, match="2 replicas take 2 GPUS, but the cluster has 0"):
        check_resources(given, {"CPU": 2})
