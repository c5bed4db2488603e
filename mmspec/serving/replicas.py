"""Replicas of a web application on many machines, by Ray Serve, behind one address.

    application = build_application(make_app, ["zoo:llava"], Replicas(count=2))
    ray.serve.run(application)

A router takes a request and passes it to a replica, whose application responds as it does alone. A
request whose replica is lost runs again on another one, unless a part of its response was sent:
then the stream ends with one error. Needs the extra `[ray]`; nothing of Ray is imported before it
is used.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import sleep
from typing import Any

from mmspec.serving.limits import MAX_READ_S, BodyRefused, is_authorised, read_body, within
from mmspec.serving.model_files import check_same_files, digest_files
from mmspec.serving.replies import (
    EVENTS,
    ApiError,
    describe_error,
    make_error,
    make_event,
    stream_chunks,
)

ATTEMPTS = 3  # replicas that a request may lose
SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string")
Message = dict[str, Any]  # of ASGI
App = Callable[[Any, Any, Any], Awaitable[None]]  # ASGI


@dataclass(frozen=True)
class Replicas:
    """How an application is replicated.

    `max_requests` of a replica are passed to it at a time, `max_queue` wait for one; one more gets
    429. A response takes at most `timeout_s`, the start of a lost replica included. With a `token`
    every request but `/health` needs it as a bearer token.
    """

    count: int = 2
    max_requests: int = 72
    max_queue: int = 64
    timeout_s: float = 600
    token: str | None = None
    resources: Mapping[str, float] = field(default_factory=lambda: {"num_cpus": 1})


class Replica:
    """One application, in a process of its own.

    Raises ValueError where a model's files are not those that were deployed.
    """

    def __init__(self, make_app: Callable[[], App], files: Mapping[str, Mapping[str, str]]) -> None:
        self.app = make_app()
        for name, digests in files.items():  # after loading: no change goes unnoticed
            check_same_files(name, digests)

    async def respond(self, scope: Message, body: bytes) -> AsyncIterator[Message]:
        """Yield the messages of the response to a request."""
        messages = asyncio.Queue[Message | None]()
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if not unread:
                await asyncio.Event().wait()  # the router cancels what its client has left
            return unread.pop()

        task = asyncio.create_task(_as_coroutine(self.app(scope, receive, messages.put)))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
            task.result()
        finally:
            task.cancel()


async def _as_coroutine(step: Awaitable[None]) -> None:
    await step


class Router:
    """Passes requests to replicas."""

    def __init__(self, replicas: Any, limits: Replicas) -> None:
        self.replicas = replicas.options(stream=True)
        self.limits = limits

    async def __call__(self, request: Any) -> Any:
        """Respond to a request of Starlette."""
        try:
            return await self._respond(request)
        except Exception as error:
            return make_error(error)

    async def _respond(self, request: Any) -> Any:
        token, path = self.limits.token, request.url.path
        if token is not None and path != "/health" and not is_authorised(request, token):
            raise ApiError(401, "the bearer token is missing or wrong", "invalid_api_key")
        if path == "/metrics":
            message = "each replica counts for itself; read the metrics that Ray Serve exports"
            raise ApiError(404, message, "not_found")
        try:
            body = await within(read_body(request), MAX_READ_S)
        except TimeoutError:
            raise BodyRefused(f"the body did not come in {MAX_READ_S:g} seconds", 408) from None
        scope = {name: request.scope[name] for name in SCOPE if name in request.scope}
        scope |= {"headers": [tuple(pair) for pair in request.scope["headers"]], "root_path": ""}
        try:
            return await within(self._run(scope, body), self.limits.timeout_s)
        except TimeoutError:
            message = f"no replica responded in {self.limits.timeout_s:g} seconds; try again later"
            raise ApiError(504, message, "timeout") from None

    async def _run(self, scope: Message, body: bytes) -> Any:
        """Run a request until a replica has responded, or begun a stream."""
        from ray.exceptions import RayActorError
        from ray.serve.exceptions import BackPressureError
        from starlette.responses import Response

        for _ in range(ATTEMPTS):
            messages = self.replicas.respond.remote(scope, body)
            try:
                head = await anext(messages)
                headers = {name.decode(): value.decode() for name, value in head["headers"]}
                if "content-length" not in headers:
                    kind = headers.get("content-type", "")
                    return stream_chunks(_pass_on(messages, await anext(messages), kind), kind)
                content = b"".join([one.get("body", b"") async for one in messages])
                return Response(content, head["status"], headers)
            except RayActorError:
                continue
            except BackPressureError:
                message = f"{self.limits.max_queue} requests wait for a replica; try again later"
                raise ApiError(429, message, "rate_limit_exceeded", {"retry-after": "1"}) from None
        raise ApiError(
            503, f"{ATTEMPTS} replicas were lost while they ran this request", "replica_lost"
        )


async def _pass_on(messages: Any, first: Message, kind: str) -> AsyncIterator[bytes]:
    """The chunks of a stream. The loss of its replica is the last event, or ends a file early."""
    from ray.exceptions import RayActorError

    yield first.get("body", b"")
    try:
        async for message in messages:
            if message.get("body"):
                yield message["body"]
    except RayActorError:
        if not kind.startswith(EVENTS):
            raise
        lost = ApiError(503, "the replica of this stream was lost; send it again", "replica_lost")
        yield make_event(describe_error(lost)[1])
        yield b"data: [DONE]\n\n"


def build_application(
    make_app: Callable[[], App], models: Sequence[str], replicas: Replicas
) -> Any:  # an `Application` of Ray Serve
    """Make the application that `ray.serve.run` deploys.

    Args:
        make_app: Makes the ASGI application in each replica; is pickled.
        models: Folders, hub names and "zoo:NAME" that it loads. A replica that finds other files
            there than this process does not start.
        replicas: Their number and limits.

    Raises ValueError for a model that is not there, and without Ray Serve.
    """
    try:
        from ray import serve
    except ImportError:
        raise ValueError(
            "replicas need Ray Serve; install it with pip install 'mmspec[ray,serve]'"
        ) from None
    files = {name: digest_files(name) for name in dict.fromkeys(models)}
    deployment: Any = serve.deployment
    common = {"graceful_shutdown_timeout_s": replicas.timeout_s, "health_check_period_s": 5}
    replica = deployment(
        Replica,
        name="Replica",
        num_replicas=replicas.count,
        max_ongoing_requests=replicas.max_requests,
        max_queued_requests=replicas.max_queue,
        max_constructor_retry_count=2,
        ray_actor_options=dict(replicas.resources),
        **common,
    )
    router = deployment(
        Router,
        name="Router",
        max_ongoing_requests=replicas.count * replicas.max_requests + replicas.max_queue + 256,
        ray_actor_options={"num_cpus": 0},
        **common,
    )
    return router.bind(replica.bind(make_app, files), replicas)


def run(application: Any, replicas: Replicas, host: str, port: int, name: str = "mmspec") -> None:
    """Deploy an application at an address, on the cluster of `RAY_ADDRESS` or a local one.

    Returns on the first interrupt, once what was taken is finished. Raises ValueError where the
    cluster lacks processors or GPUs, or no replica starts.
    """
    import ray
    from ray import serve

    cluster: Any = ray
    server: Any = serve
    is_own = not cluster.is_initialized() and "RAY_ADDRESS" not in os.environ
    if not cluster.is_initialized():
        cluster.init(include_dashboard=False)
    check_resources(replicas, cluster.cluster_resources())
    server.start(http_options={"host": host, "port": port})
    try:
        server.run(application, name=name)
        with suppress(KeyboardInterrupt):
            while True:
                sleep(3600)
    except RuntimeError as error:  # its replicas did not start
        raise ValueError(f"the application was not deployed: {error}") from error
    finally:
        server.delete(name)
        if is_own:
            server.shutdown()
            cluster.shutdown()


def check_resources(replicas: Replicas, available: Mapping[str, float]) -> None:
    """Refuse replicas that would wait for a device that is not there. Raises ValueError."""
    for name, each in replicas.resources.items():
        kind = name.removeprefix("num_").upper()
        needed, found = each * replicas.count, available.get(kind.removesuffix("S"), 0)
        if needed > found:
            raise ValueError(
                f"{replicas.count} replicas take {needed:g} {kind}, but the cluster has {found:g}; "
                "start fewer, or set RAY_ADDRESS to a larger cluster"
            )
