"""Answers of a target that is served elsewhere, several at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from mmspec.cli.output import print_error
from mmspec.cli.training_examples import MIN_TOKENS, ResponseOptions, reason_to_skip
from mmspec.modality import Teacher
from mmspec.training.conversations import Question
from mmspec.training.endpoint import ChatEndpoint, EndpointAnswer, RequestRefused, chat_request
from mmspec.training.responses import NumberedQuestions, Response

TOLERANCE = 0.1  # of the number of tokens of an answer, which may be split in other ways


@dataclass(frozen=True)
class _Request:
    number: int
    question: Question
    size: int  # tokens of the prompt


class EndpointCollector:
    """Collects answers from a server, `concurrency` at once, in batches of one question.

    The first question is sent alone, and its refusal ends the run; refusals of later ones skip
    them. Raises ValueError for a server whose answers are not of the target's vocabulary, and what
    `ChatEndpoint.complete` raises.
    """

    def __init__(
        self, endpoint: ChatEndpoint, teacher: Teacher, settings: ResponseOptions, concurrency: int
    ) -> None:
        teacher.text([])  # raises ValueError for targets that do not chat
        self.endpoint, self.teacher, self.settings = endpoint, teacher, settings
        self.concurrency = concurrency
        self.has_answered = False

    def __call__(self, batches: Iterable[NumberedQuestions]) -> Iterator[Sequence[Response]]:
        """Yield one response per question, as they arrive."""
        self.endpoint = self.endpoint.with_model()
        pending: dict[Future[EndpointAnswer], _Request] = {}
        pool = ThreadPoolExecutor(self.concurrency)
        try:
            for ((number, question),) in batches:
                limit = 2 * self.concurrency if self.has_answered else 1
                while len(pending) >= limit:
                    yield from self._receive(pending)
                    limit = 2 * self.concurrency if self.has_answered else 1
                yield from self._send(number, question, pool, pending)
            while pending:
                yield from self._receive(pending)
        finally:
            self.endpoint.stopped.set()
            pool.shutdown(cancel_futures=True)

    def _send(
        self, number: int, question: Question, pool: Any, pending: dict[Any, _Request]
    ) -> Iterator[Sequence[Response]]:
        """Request an answer, or yield why there is none."""
        try:
            media = self.teacher.load_media(question)
        except ValueError as error:
            yield [Response(number, skipped=str(error))]
            return
        size = int(self.teacher.inputs([question], [media])["attention_mask"].sum())
        reason = reason_to_skip(question, size, self.settings.max_length)
        if reason is not None:
            yield [Response(number, size, skipped=reason)]
            return
        try:
            request = chat_request(question, media.images)
        except RequestRefused as error:
            yield [Response(number, size, skipped=f"{question.place}: {error}")]
            return
        settings = self.settings
        limit = min(settings.max_new_tokens, settings.max_length - size)
        sampling = {"max_tokens": limit, "temperature": settings.temperature}
        seed = settings.seed + number
        sent = pool.submit(self.endpoint.complete, **request, **sampling, seed=seed)
        pending[sent] = _Request(number, question, size)

    def _receive(self, pending: dict[Any, _Request]) -> Iterator[Sequence[Response]]:
        """Yield the responses to requests that are done."""
        done, _ = wait(pending, return_when=FIRST_COMPLETED)
        failure: Exception | None = None
        for one in sorted(done, key=lambda future: pending[future].number):
            request = pending.pop(one)
            try:
                yield [self._respond(request, one.result())]
            except RequestRefused as error:
                place = request.question.place
                if not self.has_answered:
                    raise ValueError(f"{place} has no answer: {error}") from error
                yield [Response(request.number, request.size, skipped=f"{place}: {error}")]
            except (ValueError, OSError) as error:
                failure = error  # after the answers that have arrived
        if failure is not None:
            raise failure

    def _respond(self, request: _Request, answer: EndpointAnswer) -> Response:
        tokens, place = self._tokenize(request, answer), request.question.place
        if not self.has_answered and answer.num_prompt_tokens not in (None, request.size):
            print_error(
                f"{place} has {request.size} tokens here and {answer.num_prompt_tokens} at "
                f"{self.endpoint.url}: its chat template or its image sizes differ, so it answers "
                "other prompts than those trained on"
            )
        self.has_answered = True
        if len(tokens) < MIN_TOKENS:
            reason = f"the answer to {place} has {len(tokens)} tokens: nothing to draft"
            return Response(request.number, request.size, skipped=reason)
        return Response(request.number, request.size, tuple(tokens))

    def _tokenize(self, request: _Request, answer: EndpointAnswer) -> list[int]:
        """The tokens of an answer. Raises RequestRefused where they are not what was generated."""
        tokens = self.teacher.tokens(answer.text)
        if answer.is_cut and tokens[-1:] and tokens[-1] in self.teacher.end_ids:
            tokens = tokens[:-1]
        text = [one for one in tokens if one not in self.teacher.end_ids]
        if self.teacher.text(text).strip() != answer.text.strip():
            raise RequestRefused(
                f"the answer {answer.text[:80]!r} is not made of the target's tokens; give "
                "--endpoint a server of the target"
            )
        expected = answer.num_tokens
        if expected is not None and abs(len(tokens) - expected) > 1 + TOLERANCE * expected:
            raise RequestRefused(
                f"an answer of {expected} tokens has {len(tokens)} of the target's; give "
                "--endpoint a server of the target that returns whole answers"
            )
        return tokens[: self.settings.max_length - request.size]


def wait_for_others(batches: Any) -> Iterator[Sequence[Response]]:
    """Yield no response: another process of a sharded target sends the questions."""
    yield from ()
