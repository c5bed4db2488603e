"""The web application: an OpenAI-compatible API on one accelerated model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import time
from typing import Any, Protocol

from mmspec.serving.limits import check_token, is_authorised
from mmspec.serving.metrics import Metrics
from mmspec.serving.replies import ApiError, make_error

Handler = Callable[[Any], Awaitable[Any]]  # of a request of Starlette


class Routes(Protocol):
    """A part of the API."""

    def handlers(self) -> Mapping[str, Handler]:
        """Handlers of POST requests, by path."""

    def close(self) -> None:
        """Finish what was taken."""


@dataclass(frozen=True)
class JoinedRoutes:
    """The routes of several parts."""

    parts: tuple[Routes, ...]

    def handlers(self) -> Mapping[str, Handler]:
        """The handlers of all parts."""
        return {path: handle for one in self.parts for path, handle in one.handlers().items()}

    def close(self) -> None:
        """Finish what was taken."""
        for one in self.parts:
            one.close()


@dataclass(frozen=True)
class Served:
    """The model of a server."""

    name: str
    routes: Routes
    metrics: Metrics


def create_app(served: Served, token: str | None = None) -> Any:
    """Make the FastAPI application.

    With a `token` every request but `/health` needs it as a bearer token (401 otherwise). Raises
    ValueError for an invalid token, and without FastAPI.
    """
    if token is not None:
        check_token(token)
    try:
        from fastapi import FastAPI, Request
        from starlette.responses import JSONResponse, Response
    except ImportError:
        raise ValueError(
            "the server needs FastAPI and uvicorn; install them with pip install 'mmspec[serve]'"
        ) from None

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(served.routes.close)

    app: Any = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)

    def add(method: str, path: str, handle: Handler, is_open: bool = False) -> None:
        async def respond(request: Any) -> Any:
            try:
                if not is_open and token is not None and not is_authorised(request, token):
                    raise ApiError(401, "the bearer token is missing or wrong", "invalid_api_key")
                reply = await handle(request)
            except Exception as error:
                reply = make_error(error)
            served.metrics.responses.labels(path, str(reply.status_code)).inc()
            return reply

        respond.__annotations__ = {"request": Request}
        app.add_api_route(path, respond, methods=[method])

    async def health(_: Any) -> Any:
        return JSONResponse({"status": "ok", "model": served.name})

    async def metrics(_: Any) -> Any:
        body, kind = served.metrics.render()
        return Response(body, headers={"content-type": kind})

    async def models(_: Any) -> Any:
        one = {"id": served.name, "object": "model", "created": int(time()), "owned_by": "mmspec"}
        return JSONResponse({"object": "list", "data": [one]})

    add("GET", "/health", health, is_open=True)
    add("GET", "/metrics", metrics)
    add("GET", "/v1/models", models)
    handlers = served.routes.handlers()
    for path, handle in handlers.items():
        add("POST", path, handle)
    paths = ", ".join(("/v1/models", "/metrics", "/health", *handlers))

    async def unknown(request: Any, _: Exception) -> Any:
        path = f"{request.method} {request.url.path}"
        message = f"{path} is not served for {served.name}; call one of: {paths}"
        return make_error(ApiError(404, message, "not_found"))

    app.add_exception_handler(404, unknown)
    return app
