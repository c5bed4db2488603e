"""Server side: a small web service that ranks drafted tokens by the target."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmspec import registry
from mmspec.distributions.categorical import as_categorical
from mmspec.distributions.noise import KeyedNoise
from mmspec.distributions.sampling import Sampling
from mmspec.draft import Draft, Kind, Round, Verdict
from mmspec.edge.messages import (
    BEGIN,
    CHECK,
    HELLO,
    MAX_DRAFT_TOKENS,
    MAX_RANKS,
    InvalidMessage,
    check_id_rows,
    check_size,
    parse,
    unpack,
)
from mmspec.errors import check_number
from mmspec.recipes import get
from mmspec.serving.limits import (
    MAX_BODY_BYTES,
    BodyRefused,
    check_token,
    create_server,
    is_authorised,
    read_body,
)
from mmspec.targets.readers.encoder_decoder import EncoderDecoder
from mmspec.targets.readers.visual import check_request
from mmspec.targets.tokens.causal import CausalTarget
from mmspec.targets.tokens.context import Context, Request

CLIENT_ERRORS = (ValueError, TypeError, RuntimeError, IndexError)  # raised for invalid input


@dataclass
class _DeviceRequest:
    """State of one request of a device."""

    context: Context
    max_new_tokens: int
    drafted: list[list[int]] = field(default_factory=list)  # the last ranked draft


class Service:
    """Ranks drafts by one model; keeps the `max_requests` requests that were used last.

    `begin` takes the tensors of a request and its first check, `check` the tokens accepted since
    and a new draft. Both raise InvalidMessage for invalid messages, and `check` KeyError for a
    request that is unknown, dropped, or not where the device believes it is. One forward at a time.
    """

    def __init__(self, model: Any, max_requests: int = 8) -> None:
        check_number("most", max_requests, 1, whole=True, example=8)
        owner = registry.find_modality(model, None)
        session: Any = registry.plug(owner).session(model, get("plain"), None, {})
        self.reader = session.bound.backbone
        self.prepare_inputs = session.text.prepare_inputs
        self.check_inputs = session.text.check
        self.target = CausalTarget(self.reader, defers_prefill=True)
        self.max_requests = max_requests
        self.requests: OrderedDict[str, _DeviceRequest] = OrderedDict()
        self.lock = threading.Lock()

    @property
    def description(self) -> dict[str, Any]:
        return {"model": type(self.reader.model).__name__, "vocabulary": self.reader.vocabulary}

    @torch.no_grad()
    def begin(
        self, tensors: Mapping[str, Tensor], max_new_tokens: int, message: Mapping[str, Any]
    ) -> tuple[str, list[list[list[int]]]]:
        """Store a request; return its id and the response to its first check.

        The prompt is read with the first draft, so a new request is never dropped before it.
        Tensors are named as in `Request.inputs`; `input_ids` of an encoder-decoder are those of
        the decoder.
        """
        shape = tensors["input_ids"].shape if "input_ids" in tensors else ()
        if len(shape) != 2 or not shape[0] or not shape[1]:
            raise InvalidMessage("a request needs input_ids (rows, tokens)")
        check_size(shape[0], shape[1], max_new_tokens)
        given = {name: value.to(self.reader.device) for name, value in tensors.items()}
        try:
            self.check_inputs(given)
            inputs = (
                given if isinstance(self.reader, EncoderDecoder) else self.prepare_inputs(given)
            )
            check_request(self.reader.model, self.reader.family, inputs)
        except CLIENT_ERRORS as error:
            raise InvalidMessage(str(error)) from None
        rows = len(inputs["input_ids"])
        noise = KeyedNoise.from_seed(0, rows, self.reader.device)
        name = secrets.token_urlsafe(16)
        with self.lock:
            context = self.target.prefill(Request(inputs, Sampling(), noise, max_new_tokens))
            self.requests[name] = _DeviceRequest(context, max_new_tokens)
            while len(self.requests) > self.max_requests:
                self.requests.popitem(last=False)
            return name, self._rank_request(name, message)

    @torch.no_grad()
    def check(self, message: Mapping[str, Any]) -> list[list[list[int]]]:
        """Return the best ids after the context and after every drafted token, per row."""
        name = message.get("request")
        if not isinstance(name, str):
            raise InvalidMessage("request is not an id")
        with self.lock:
            self.requests.move_to_end(name)
            return self._rank_request(name, message)

    def _rank_request(self, name: str, message: Mapping[str, Any]) -> list[list[list[int]]]:
        try:
            return self._rank(self.requests[name], message)
        except Exception as error:
            del self.requests[name]  # its state is unknown
            if isinstance(error, CLIENT_ERRORS):  # the prompt is read by the first check
                raise InvalidMessage(str(error)) from error
            raise

    def _rank(self, request: _DeviceRequest, message: Mapping[str, Any]) -> list[list[list[int]]]:
        rows, size = request.context.batch, self.reader.vocabulary
        ranks = message.get("ranks")
        if type(ranks) is not int or not 1 <= ranks <= min(MAX_RANKS, size):
            raise InvalidMessage(f"ranks is not a number from 1 to {min(MAX_RANKS, size)}")
        tokens = check_id_rows(message.get("tokens"), rows, request.max_new_tokens, size, "tokens")
        drafted = check_id_rows(message.get("draft"), rows, MAX_DRAFT_TOKENS, size, "draft")
        accepted = message.get("accepted")
        if not isinstance(accepted, list) or len(accepted) != rows:
            raise InvalidMessage(f"accepted has no {rows} numbers")
        before = request.drafted or [[]] * rows
        for count, row, new in zip(accepted, before, tokens, strict=True):
            if type(count) is not int or not 0 <= count <= len(row) or row[:count] != new[:count]:
                raise InvalidMessage("accepted is not a common prefix of draft and tokens")
        limit = request.max_new_tokens
        if any(
            request.context.num_generated(row) + len(new) > limit for row, new in enumerate(tokens)
        ):
            raise InvalidMessage(f"more than the {limit} tokens that were requested")
        if message.get("known") != [request.context.num_generated(row) for row in range(rows)]:
            raise KeyError("a message was lost or came twice")
        self._keep(request, accepted, tokens)
        draft = _chain(drafted, self.reader.device)
        distribution = as_categorical(self.target.score(request.context, draft).distribution)
        request.drafted = drafted
        best = _best(distribution.scores, ranks).tolist()
        return [ids[: len(row) + 1] for ids, row in zip(best, drafted, strict=True)]

    def _keep(self, request: _DeviceRequest, accepted: list[int], tokens: list[list[int]]) -> None:
        """Commit the accepted part of the last draft, and the tokens that the device added."""
        rows, last = len(tokens), _chain(request.drafted or [[]] * len(tokens), self.reader.device)
        count = torch.tensor(accepted)
        round_ = Round(
            index=0,
            drafted=tuple(map(len, request.drafted)),
            accepted=tuple(accepted),
            path=tuple(tuple(range(one)) for one in accepted),
            takes_next=(True,) * rows,
            tokens=tuple(map(tuple, tokens)),
            finished=(False,) * rows,
            verdict=Verdict(count[:, None], count, count),
            calls=1 if request.drafted else 0,
        )
        request.context = self.target.keep(request.context, last, round_)


def _chain(rows: list[list[int]], device: torch.device) -> Draft:
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
    mask = torch.tensor([[at < len(row) for at in range(width)] for row in rows], device=device)
    return Draft.chain(
        tokens.long().view(len(rows), width), Kind.DET, mask=mask.view(len(rows), width)
    )


def _best(scores: Tensor, ranks: int) -> Tensor:  # (B, M, V) -> (B, M, ranks) ids, best first
    """Select the best ids without sorting; ties go to the lower id."""
    remaining, found = scores.clone(), []
    for _ in range(ranks):
        found.append(remaining.argmax(-1))
        remaining.scatter_(-1, found[-1][..., None], -torch.inf)
    return torch.stack(found, -1)


def create_app(service: Service, token: str, max_bytes: int = MAX_BODY_BYTES) -> Any:
    """Make the FastAPI application of a service.

    Requests without `token` are rejected (401), and so are bodies of more than `max_bytes` (413).
    Raises ValueError for an invalid token, and without FastAPI.
    """
    check_token(token)
    try:
        from fastapi import FastAPI, Request, Response
        from starlette.concurrency import run_in_threadpool
    except ImportError:
        raise ValueError(
            "the service needs FastAPI and uvicorn; install them with pip install 'mmspec[edge]'"
        ) from None
    app: Any = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    async def respond(request: Any, handle: Any) -> Any:
        if not is_authorised(request, token):
            return Response(status_code=401)
        try:
            body = await read_body(request, max_bytes)
        except BodyRefused as error:
            return Response(str(error), status_code=error.status)
        try:
            return await run_in_threadpool(handle, body)
        except InvalidMessage as error:
            return Response(str(error), status_code=422)
        except KeyError:
            return Response("no such request", status_code=404)

    async def hello(request: Any) -> Any:
        return await respond(request, lambda _: service.description)

    async def begin(request: Any) -> Any:
        count = request.query_params.get("room", "")
        if not count.isdecimal() or not 0 < int(count[:9]) <= 1 << 16:
            return Response("room is not a number of tokens from 1 to 65536", status_code=422)

        def start(body: bytes) -> dict[str, Any]:
            tensors, message = unpack(body)
            name, best = service.begin(tensors, int(count), message)
            return {"request": name, "best": best}

        return await respond(request, start)

    async def check(request: Any) -> Any:
        return await respond(request, lambda body: {"best": service.check(parse(body))})

    for path, handle in ((HELLO, hello), (BEGIN, begin), (CHECK, check)):
        handle.__annotations__ = {"request": Request}
        app.post(path)(handle)
    return app


def serve(model: Any, token: str, host: str = "127.0.0.1", port: int = 8765, most: int = 8) -> None:
    """Serve a model until interrupted, by default to this machine only.

    `most` limits the requests in memory. Everyone who knows `token` may use the service. The
    connection is not encrypted: put it behind a proxy that is. Raises ValueError as `create_app`.
    """
    check_number("port", port, 0, 65535, whole=True, example=8765)
    server = create_server(create_app(Service(model, most), token), host, port)
    with suppress(KeyboardInterrupt):
        server.run()
