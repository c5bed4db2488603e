"""Chat completions of an engine: tokens to text as they come, stop texts, and the API's objects."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

from mmspec.draft import Round
from mmspec.serving.batch import TokenScores
from mmspec.serving.chat import ChatModel, ChatRequest, InvalidRequest
from mmspec.serving.engine import Engine
from mmspec.serving.ticket import Completion, QueueFull

CUT = "\ufffd"  # ends a text whose last character is not complete


class StopsAtText(StoppingCriteria):
    """Stops a request at the token that completes one of its stop texts."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], prompt: int) -> None:
        self.tokenizer, self.stops, self.prompt = tokenizer, tuple(stops), prompt
        self.tail = max(map(len, stops)) + 4  # tokens that may hold a stop text

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        new = input_ids[0, max(self.prompt, input_ids.shape[1] - self.tail) :]
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        return torch.tensor([any(stop in text for stop in self.stops)])


@dataclass
class TextStream:
    """The text of a row as its tokens come; what may be part of a stop text is held back."""

    tokenizer: Any
    stops: Sequence[str] = ()
    tokens: list[int] = field(default_factory=list)
    sent: int = 0  # characters
    is_stopped: bool = False  # at a stop text, which is not returned

    def add(self, tokens: Sequence[int]) -> str:
        """The text that is certain after these tokens."""
        self.tokens += tokens
        text = self._decode()
        held = 0 if self.is_stopped else self._count_held(text)
        return self._send(text[: len(text) - held])

    def finish(self) -> str:
        """The rest of the text."""
        return self._send(self._decode())

    def _decode(self) -> str:
        text = str(self.tokenizer.decode(self.tokens, skip_special_tokens=True))
        ends = [at for at in (text.find(stop) for stop in self.stops) if at >= 0]
        self.is_stopped = bool(ends)
        return text[: min(ends)] if ends else text

    def _count_held(self, text: str) -> int:
        if text.endswith(CUT):
            return len(text) - len(text.rstrip(CUT))
        starts = [
            size
            for stop in self.stops
            for size in range(1, len(stop))
            if text.endswith(stop[:size])
        ]
        return max(starts, default=0)

    def _send(self, text: str) -> str:
        new, self.sent = text[self.sent :], max(self.sent, len(text))
        return new


@dataclass(frozen=True)
class Delta:
    """A piece of a choice: its text, or its end."""

    choice: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    completion: Completion | None = None  # at its end
    is_stopped: bool = False  # by an end token or a stop text


class ChatService:
    """Runs chat requests on an engine.

    `timeout_s` is the time that a request may take, waiting included; `max_new_tokens` is the
    default limit of new tokens.
    """

    def __init__(
        self, engine: Engine, chat: ChatModel, max_new_tokens: int = 512, timeout_s: float = 600
    ) -> None:
        self.engine, self.chat = engine, chat
        self.max_new_tokens, self.timeout_s = max_new_tokens, timeout_s

    def submit(self, request: ChatRequest, listen: Any) -> list[Future[Completion]]:
        """Queue every choice; `listen(choice, round)` is called in the engine's thread.

        Raises InvalidRequest for what the model refuses, and QueueFull, which queues none of them.
        """
        futures = list[Future[Completion]]()
        try:
            inputs = self.chat.make_inputs(request.turns)
            for choice in range(request.choices):
                futures.append(
                    self.engine.submit(
                        {**inputs, **self._settings(request, inputs, choice)},
                        timeout_s=self.timeout_s,
                        on_round=partial(listen, choice),
                        logprobs=request.alternatives,
                    )
                )
        except Exception as error:
            for future in futures:
                future.cancel()
            if isinstance(error, ValueError) and not isinstance(error, QueueFull):
                raise InvalidRequest(str(error)) from error
            raise
        return futures

    def _settings(
        self, request: ChatRequest, inputs: dict[str, Tensor], choice: int
    ) -> dict[str, Any]:
        made: dict[str, Any] = dict(request.settings)
        if request.seed is not None:
            made["seed"] = request.seed
            made["row_ids"] = [choice]
        if request.grammar is not None:
            made |= {"grammar": request.grammar, "tokenizer": self.chat.tokenizer}
        if request.stops:
            prompt = inputs["input_ids"].shape[1]
            made["stopping_criteria"] = [StopsAtText(self.chat.tokenizer, request.stops, prompt)]
        return made

    async def run(self, request: ChatRequest) -> AsyncIterator[Delta]:
        """Queue a request and yield its pieces. Closing the iterator cancels it."""
        loop, deltas = asyncio.get_running_loop(), asyncio.Queue[Any]()

        def put(choice: int, item: Any) -> None:
            loop.call_soon_threadsafe(deltas.put_nowait, (choice, item))

        futures = await submit_futures(partial(self.submit, request, put))
        for choice, future in enumerate(futures):
            future.add_done_callback(partial(put, choice))
        texts = [TextStream(self.chat.tokenizer, request.stops) for _ in futures]
        left = len(futures)
        try:
            while left:
                choice, item = await deltas.get()
                if isinstance(item, Round):
                    tokens = tuple(item.tokens[0])
                    yield Delta(choice, texts[choice].add(tokens), tokens)
                    continue
                left -= 1
                done, text = item.result(), texts[choice].finish()
                limit = request.settings["max_new_tokens"]
                is_stopped = texts[choice].is_stopped or len(done.tokens) < limit
                is_stopped = is_stopped or self._is_end(done.tokens[-1])
                yield Delta(choice, text, (), done, is_stopped)
        finally:
            for future in futures:
                future.cancel()

    def _is_end(self, token: int) -> bool:
        ends = self.engine.session.bound.model.generation_config.eos_token_id
        return token in (ends if isinstance(ends, list) else [ends])


async def submit_futures(
    submit: Callable[[], list[Future[Completion]]],
) -> list[Future[Completion]]:
    """Submit requests in a thread; they are cancelled where nobody waits for it any more."""
    submitted = asyncio.ensure_future(asyncio.to_thread(submit))
    try:
        return await asyncio.shield(submitted)
    except asyncio.CancelledError:  # the thread goes on
        submitted.add_done_callback(_cancel_submitted)
        raise


def _cancel_submitted(done: asyncio.Future[list[Future[Completion]]]) -> None:
    if not done.cancelled() and done.exception() is None:
        for future in done.result():
            future.cancel()


@dataclass
class ChatReply:
    """The objects of the API for one request: chunks of a stream, or one response."""

    model: str
    request: ChatRequest
    tokenizer: Any
    name: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    done: dict[int, Delta] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)

    def add(self, delta: Delta) -> None:
        """Take a piece."""
        self.texts[delta.choice] = self.texts.get(delta.choice, "") + delta.text
        if delta.completion is not None:
            self.done[delta.choice] = delta

    def chunk(self, delta: Delta, is_first: bool) -> dict[str, Any]:
        """The piece as an event of a stream."""
        content: dict[str, Any] = {"role": "assistant"} if is_first else {}
        choice: dict[str, Any] = {
            "index": delta.choice,
            "delta": {**content, **({"content": delta.text} if delta.text or is_first else {})},
            "finish_reason": None,
            "logprobs": None,
        }
        if delta.completion is not None:
            choice["finish_reason"] = "stop" if delta.is_stopped else "length"
            choice["logprobs"] = self._logprobs(delta.completion)
        return self._object("chat.completion.chunk", [choice])

    def usage_chunk(self) -> dict[str, Any]:
        """The last event of a stream with `include_usage`."""
        return {**self._object("chat.completion.chunk", []), "usage": self._usage()}

    def response(self) -> dict[str, Any]:
        """The whole response."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": self.texts[index], "refusal": None},
                "finish_reason": "stop" if delta.is_stopped else "length",
                "logprobs": self._logprobs(delta.completion),
            }
            for index, delta in sorted(self.done.items())
        ]
        return {**self._object("chat.completion", choices), "usage": self._usage()}

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _usage(self) -> dict[str, Any]:
        """Tokens read and written; accepted and rejected draft tokens under the API's own names."""
        found = [delta.completion for delta in self.done.values() if delta.completion is not None]
        prompt = found[0].sequences.shape[1] - len(found[0].tokens)
        new = sum(len(one.tokens) for one in found)
        accepted = sum(one.stats.num_accepted_draft_tokens for one in found)
        drafted = sum(one.stats.num_draft_tokens for one in found)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }

    def _logprobs(self, completion: Completion | None) -> dict[str, Any] | None:
        if completion is None or self.request.alternatives is None:
            return None
        scores: TokenScores = completion.token_scores
        pairs = zip(completion.tokens, scores, strict=True)
        return {
            "content": [
                {
                    **self._score(token, value),
                    "top_logprobs": [self._score(*one) for one in best],
                }
                for token, (value, best) in pairs
            ],
            "refusal": None,
        }

    def _score(self, token: int, value: float) -> dict[str, Any]:
        text = self.tokenizer.decode([token])
        return {"token": text, "logprob": max(value, -9999.0), "bytes": [*text.encode()]}
