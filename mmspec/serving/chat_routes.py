"""The route `/v1/chat/completions`: one response, or a stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from mmspec.serving.app import Handler
from mmspec.serving.chat import ChatRequest
from mmspec.serving.completion import ChatReply, ChatService, Delta
from mmspec.serving.limits import MAX_BODY_BYTES, read_body
from mmspec.serving.media import Fetch
from mmspec.serving.metrics import Metrics
from mmspec.serving.replies import (
    check_model,
    describe_error,
    make_event,
    parse_body,
    run_while_connected,
    stream_events,
)


@dataclass(frozen=True)
class ChatRoutes:
    """Chat completions of one model.

    `fetch` reads media from network addresses; without it requests that name any are refused.
    """

    name: str
    service: ChatService
    metrics: Metrics
    max_bytes: int = MAX_BODY_BYTES
    fetch: Fetch | None = None

    def handlers(self) -> Mapping[str, Handler]:
        """The handler of chat completions."""
        return {"/v1/chat/completions": self.complete}

    def close(self) -> None:
        """Finish what was taken."""
        self.service.engine.close()

    async def complete(self, request: Any) -> Any:
        """Respond to a request. Raises InvalidRequest, QueueFull, ApiError, DeadlineExceeded."""
        from starlette.responses import JSONResponse

        body = parse_body(await read_body(request, self.max_bytes))
        check_model(body, self.name)
        parsed = await asyncio.to_thread(
            ChatRequest.parse, body, self.service.max_new_tokens, self.fetch
        )
        reply = ChatReply(self.name, parsed, self.service.chat.tokenizer)
        deltas = self.service.run(parsed)
        if parsed.streams:
            first = await run_while_connected(request, _take(deltas))  # errors are no streams
            return stream_events(self._events(reply, first, deltas))
        await run_while_connected(request, self._collect(reply, deltas))
        return JSONResponse(reply.response())

    async def _collect(self, reply: ChatReply, deltas: AsyncIterator[Delta]) -> None:
        async with aclosing(deltas):  # type: ignore[type-var]
            async for delta in deltas:
                self._add(reply, delta)

    async def _events(
        self, reply: ChatReply, first: Delta, deltas: AsyncIterator[Delta]
    ) -> AsyncIterator[bytes]:
        begun = set[int]()

        def make_chunk(delta: Delta) -> bytes:
            made = reply.chunk(delta, is_first=delta.choice not in begun)
            begun.add(delta.choice)
            return make_event(made)

        async with aclosing(deltas):  # type: ignore[type-var]
            try:
                self._add(reply, first)
                yield make_chunk(first)
                async for delta in deltas:
                    self._add(reply, delta)
                    if delta.text or delta.completion is not None:
                        yield make_chunk(delta)
                if reply.request.streams_usage:
                    yield make_event(reply.usage_chunk())
            except Exception as error:  # the status is sent already
                yield make_event(describe_error(error)[1])
            yield b"data: [DONE]\n\n"

    def _add(self, reply: ChatReply, delta: Delta) -> None:
        reply.add(delta)
        if delta.completion is not None:
            self.metrics.observe(delta.completion)


async def _take(deltas: AsyncIterator[Delta]) -> Delta:
    return await anext(deltas)
