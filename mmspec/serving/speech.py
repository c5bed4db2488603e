"""Speech of a server: each request's samples as its codes are verified.

`EngineSpeaker` decodes many requests at once, `SerialSpeaker` one after the other. A codec that
cannot decode a prefix gives all samples in one piece, at the end.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from mmspec.draft import Round
from mmspec.serving.chat import InvalidRequest
from mmspec.serving.completion import submit_futures
from mmspec.serving.engine import Engine
from mmspec.serving.ticket import Completion, QueueFull
from mmspec.serving.worker import SerialQueue

# settings, a text -> the arguments of `synthesize`
MakeRequest = Callable[[Mapping[str, Any], str], Mapping[str, Any]]


@runtime_checkable
class SpeechSession(Protocol):
    """A session that synthesizes; its `codec` has `streams`, `measure()` and `sampling_rate`."""

    codec: Any


@runtime_checkable
class BatchedSpeechSession(Protocol):
    """One whose requests can be decoded by an `Engine`."""

    codec: Any

    def plan(self, arguments: Mapping[str, Any]) -> Any: ...
    def prepare_arguments(self, args: Any, arguments: Mapping[str, Any]) -> dict[str, Any]: ...
    def open_stream(self, request: Mapping[str, Any]) -> Any: ...  # `extend(tokens)` -> samples


@dataclass(frozen=True)
class Piece:
    """The next samples (n,) of a request, float32; with the last ones the tokens it took."""

    samples: Tensor
    usage: Mapping[str, int] | None = None


class Speaker(Protocol):
    """Synthesizes the requests of a server."""

    codec: Any

    def run(self, settings: Mapping[str, Any], text: str, seed: int) -> AsyncIterator[Piece]:
        """Yield the pieces of a text; the last one has its usage. Closing it ends the request.

        Raises InvalidRequest, QueueFull and TimeoutError.
        """

    def close(self) -> None:
        """Finish what was taken."""


class EngineSpeaker:
    """Decodes the codes of many requests as one batch.

    `timeout_s` is the time that a request may take, waiting included.
    """

    def __init__(self, engine: Engine, make_request: MakeRequest, timeout_s: float) -> None:
        self.engine, self.make_request, self.timeout_s = engine, make_request, timeout_s
        session: Any = engine.session
        self.session: BatchedSpeechSession = session
        self.codec = session.codec

    async def run(self, settings: Mapping[str, Any], text: str, seed: int) -> AsyncIterator[Piece]:
        """See `Speaker`."""
        mailbox, request = Mailbox(), dict[str, Any]()

        def submit() -> list[Future[Completion]]:
            try:
                given = {**self.make_request(settings, text), "seed": seed}
                request.update(self.session.prepare_arguments((), given))
                return [self.engine.submit(request, timeout_s=self.timeout_s, on_round=mailbox.put)]
            except ValueError as error:
                raise _refuse(error) from error

        (future,) = await submit_futures(submit)
        future.add_done_callback(mailbox.put)
        stream, done, tokens = self.session.open_stream(request), None, list[int]()
        try:
            while done is None:
                for item in await mailbox.take():
                    if isinstance(item, Round):
                        tokens += item.tokens[0]
                    else:
                        done = item.result()
                if done is None and not self.codec.streams:
                    continue
                samples, tokens = await asyncio.to_thread(stream.extend, tokens), []
                if done is not None:
                    prompt = done.sequences.shape[1] - len(done.tokens)
                    yield Piece(samples, count_usage(prompt, len(done.tokens)))
                elif len(samples):
                    yield Piece(samples)
        finally:
            future.cancel()

    def close(self) -> None:
        """Finish what was taken."""
        self.engine.close()


class SerialSpeaker:
    """Synthesizes one request after the other: for models that decode each on its own.

    `synthesize` takes the arguments of the call, with `on_round`.
    """

    def __init__(
        self,
        synthesize: Callable[[Mapping[str, Any]], Any],
        make_request: MakeRequest,
        codec: Any,
        queue: SerialQueue,
        timeout_s: float,
    ) -> None:
        self.synthesize, self.make_request, self.codec = synthesize, make_request, codec
        self.queue, self.timeout_s = queue, timeout_s

    async def run(self, settings: Mapping[str, Any], text: str, seed: int) -> AsyncIterator[Piece]:
        """See `Speaker`."""
        mailbox, is_left = Mailbox(), threading.Event()
        counted, deadline = 0, monotonic() + self.timeout_s

        def observe(round_: Round) -> None:
            if is_left.is_set():
                raise Abandoned
            if self.codec.streams:
                send(round_.partial()[0])

        def send(waveform: Tensor) -> None:
            nonlocal counted
            if len(waveform) > counted:
                mailbox.put(waveform[counted:])
                counted = len(waveform)

        def work() -> Mapping[str, int]:
            try:
                if is_left.is_set():
                    raise Abandoned
                request = {**self.make_request(settings, text), "seed": seed}
                output = self.synthesize({**request, "on_round": observe})
            except ValueError as error:
                raise _refuse(error) from error
            send(output.waveform)
            return count_usage(output.prompt_tokens, output.stats.num_new_tokens)

        future = self.queue.submit(work)
        future.add_done_callback(mailbox.put)
        usage = None
        try:
            while usage is None:
                samples = [torch.zeros(0)]
                for item in await self._take(mailbox, deadline):
                    if isinstance(item, Tensor):
                        samples.append(item)
                    else:
                        usage = item.result()
                yield Piece(torch.cat(samples), usage)
        finally:
            is_left.set()
            future.cancel()

    async def _take(self, mailbox: Mailbox, deadline: float) -> list[Any]:
        try:
            async with asyncio.timeout(max(deadline - monotonic(), 0)):
                return await mailbox.take()
        except TimeoutError:
            raise TimeoutError(f"the request did not end within {self.timeout_s:g} s") from None

    def close(self) -> None:
        """Finish what was taken."""
        self.queue.close()


class Abandoned(Exception):
    """Ends a run whose client has gone."""


class Mailbox:
    """Passes items of other threads to the event loop that makes it."""

    def __init__(self) -> None:
        self.loop, self.items = asyncio.get_running_loop(), asyncio.Queue[Any]()

    def put(self, item: Any) -> None:
        """Add an item, from any thread."""
        self.loop.call_soon_threadsafe(self.items.put_nowait, item)

    async def take(self) -> list[Any]:
        """All items that are there; waits for the first."""
        found = [await self.items.get()]
        while not self.items.empty():
            found.append(self.items.get_nowait())
        return found


def count_usage(prompt: int, new: int) -> dict[str, int]:
    """Tokens under the names of the API."""
    return {"input_tokens": prompt, "output_tokens": new, "total_tokens": prompt + new}


def _refuse(error: ValueError) -> ValueError:
    """The error of a request as the client's, unless the queue was full."""
    return error if isinstance(error, QueueFull) else InvalidRequest(str(error))
