"""The target's side: a small web service that ranks what a device drafted."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmspec import registry
from mmspec.distributions.noise import KeyedNoise
from mmspec.distributions.sampling import Sampling
from mmspec.draft import Draft, Kind, Round, Verdict, categorical
from mmspec.edge.messages import (
    BEGIN,
    CHECK,
    DRAFTED,
    HELLO,
    LARGEST,
    RANKS,
    ROWS,
    Garbled,
    parse,
    rows_of_ids,
    unpack,
)
from mmspec.recipes import get
from mmspec.targets.readers.encoder_decoder import EncoderDecoder
from mmspec.targets.readers.visual import check_request
from mmspec.targets.tokens.causal import CausalTarget
from mmspec.targets.tokens.context import Context, Request

SENDERS = (ValueError, TypeError, RuntimeError, IndexError)  # errors of what was sent


@dataclass
class _Talk:
    """One request of a device, as far as it has been told."""

    context: Context
    room: int
    drafted: list[list[int]] = field(default_factory=list)  # what was ranked last


class Service:
    """Ranks drafts by one model; keeps the newest `most` requests in memory.

    `begin` takes the tensors of a request, `check` what was kept since and what is drafted. Both
    raise Garbled for messages that make no sense, KeyError for requests that are not (any longer)
    known. One forward at a time.
    """

    def __init__(self, model: Any, most: int = 8) -> None:
        owner = registry.find_modality(model, None)
        session: Any = registry.plug(owner).session(model, get("plain"), None, {})
        self.reader = session.bound.backbone
        self.prepared = session.text.prepared
        self.check_inputs = session.text.check
        self.target = CausalTarget(self.reader, late=True)
        self.most = most
        self.talks: OrderedDict[str, _Talk] = OrderedDict()
        self.lock = threading.Lock()

    @property
    def about(self) -> dict[str, Any]:
        return {"model": type(self.reader.model).__name__, "vocabulary": self.reader.vocabulary}

    @torch.no_grad()
    def begin(self, tensors: Mapping[str, Tensor], room: int) -> str:
        """Note a request; its prompt is read with the first draft. Returns its name.

        Tensors are named as `Request.inputs`: of an encoder-decoder `input_ids` are the decoder's.
        """
        shape = tensors["input_ids"].shape if "input_ids" in tensors else ()
        if len(shape) != 2 or not 0 < shape[0] <= ROWS or not shape[1]:
            raise Garbled(f"a request needs input_ids (rows, tokens) of 1 to {ROWS} rows")
        here = {name: value.to(self.reader.device) for name, value in tensors.items()}
        try:
            self.check_inputs(here)
            inputs = here if isinstance(self.reader, EncoderDecoder) else self.prepared(here)
            check_request(self.reader.model, self.reader.family, inputs)
        except SENDERS as error:
            raise Garbled(str(error)) from None
        rows = len(inputs["input_ids"])
        noise = KeyedNoise.seeded(0, rows, self.reader.device)
        name = secrets.token_urlsafe(16)
        with self.lock:
            context = self.target.prefill(Request(inputs, Sampling(), noise, room))
            self.talks[name] = _Talk(context, room)
            while len(self.talks) > self.most:
                self.talks.popitem(last=False)
        return name

    @torch.no_grad()
    def check(self, message: Mapping[str, Any]) -> list[list[list[int]]]:
        """The best ids behind the context and behind every drafted token, per row."""
        with self.lock:
            name = message.get("request")
            talk = self.talks[name] if isinstance(name, str) else None
            if talk is None:
                raise Garbled("request is no name")
            self.talks.move_to_end(str(name))
            try:
                return self._ranked(talk, message)
            except Exception as error:
                del self.talks[str(name)]  # nobody knows what was kept of it
                if isinstance(error, SENDERS):  # a prompt is read here for the first time
                    raise Garbled(str(error)) from error
                raise

    def _ranked(self, talk: _Talk, message: Mapping[str, Any]) -> list[list[list[int]]]:
        rows, size = talk.context.batch, self.reader.vocabulary
        ranks = message.get("ranks")
        if type(ranks) is not int or not 1 <= ranks <= min(RANKS, size):
            raise Garbled(f"ranks is no number from 1 to {min(RANKS, size)}")
        tokens = rows_of_ids(message.get("tokens"), rows, talk.room, size, "tokens")
        drafted = rows_of_ids(message.get("draft"), rows, DRAFTED, size, "draft")
        accepted = message.get("accepted")
        if not isinstance(accepted, list) or len(accepted) != rows:
            raise Garbled(f"accepted has no {rows} numbers")
        before = talk.drafted or [[]] * rows
        for count, row, new in zip(accepted, before, tokens, strict=True):
            if type(count) is not int or not 0 <= count <= len(row) or row[:count] != new[:count]:
                raise Garbled("accepted is not a beginning of what was drafted and kept")
        if any(
            talk.context.generated(row) + len(new) > talk.room for row, new in enumerate(tokens)
        ):
            raise Garbled(f"more than the {talk.room} tokens that were asked for")
        self._keep(talk, accepted, tokens)
        draft = _chain(drafted, self.reader.device)
        distribution = categorical(self.target.score(talk.context, draft).distribution)
        talk.drafted = drafted
        best = _best(distribution.scores, ranks).tolist()
        return [told[: len(row) + 1] for told, row in zip(best, drafted, strict=True)]

    def _keep(self, talk: _Talk, accepted: list[int], tokens: list[list[int]]) -> None:
        """Commit what the device kept of the last draft, and what it added by itself."""
        rows, last = len(tokens), _chain(talk.drafted or [[]] * len(tokens), self.reader.device)
        count = torch.tensor(accepted)
        kept = Round(
            index=0,
            drafted=tuple(map(len, talk.drafted)),
            accepted=tuple(accepted),
            path=tuple(tuple(range(one)) for one in accepted),
            takes_next=(True,) * rows,
            tokens=tuple(map(tuple, tokens)),
            finished=(False,) * rows,
            verdict=Verdict(count[:, None], count, count),
            calls=1 if talk.drafted else 0,
        )
        talk.context = self.target.keep(talk.context, last, kept)


def _chain(rows: list[list[int]], device: torch.device) -> Draft:
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
    mask = torch.tensor([[at < len(row) for at in range(width)] for row in rows], device=device)
    return Draft.chain(
        tokens.long().view(len(rows), width), Kind.DET, mask=mask.view(len(rows), width)
    )


def _best(scores: Tensor, ranks: int) -> Tensor:  # (B, M, V) -> (B, M, ranks) ids, best first
    """Ties go to the lower id; nothing is sorted."""
    left, found = scores.clone(), []
    for _ in range(ranks):
        found.append(left.argmax(-1))
        left.scatter_(-1, found[-1][..., None], -torch.inf)
    return torch.stack(found, -1)


def application(service: Service, token: str, largest: int = LARGEST) -> Any:
    """The service as a FastAPI application.

    Whoever does not show `token` learns nothing (401), and messages of more than `largest` bytes
    are not read to their end (413). Raises ValueError for a token of fewer than 16 characters, and
    where FastAPI is not installed.
    """
    if len(token) < 16:
        raise ValueError(
            f"a token of {len(token)} characters is guessed soon; give 16 or more, such as "
            "secrets.token_urlsafe()"
        )
    try:
        from fastapi import FastAPI, Request, Response
        from starlette.concurrency import run_in_threadpool
    except ImportError:
        raise ValueError(
            "the service needs FastAPI and uvicorn; install them with pip install 'mmspec[edge]'"
        ) from None
    app: Any = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    async def answered(request: Any, act: Any) -> Any:
        shown = request.headers.get("authorization", "").encode()
        if not secrets.compare_digest(shown, f"Bearer {token}".encode()):
            return Response(status_code=401)
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > largest:
                return Response(status_code=413)
        try:
            return await run_in_threadpool(act, bytes(body))
        except Garbled as error:
            return Response(str(error), status_code=422)
        except KeyError:
            return Response("no such request", status_code=404)

    async def hello(request: Any) -> Any:
        return await answered(request, lambda _: service.about)

    async def begin(request: Any) -> Any:
        room = request.query_params.get("room", "")
        if not room.isdecimal() or not 0 < int(room[:9]) <= 1 << 16:
            return Response("room is no number of tokens", status_code=422)
        return await answered(
            request, lambda body: {"request": service.begin(unpack(body), int(room))}
        )

    async def check(request: Any) -> Any:
        return await answered(request, lambda body: {"best": service.check(parse(body))})

    for path, act in ((HELLO, hello), (BEGIN, begin), (CHECK, check)):
        act.__annotations__ = {"request": Request}
        app.post(path)(act)
    return app


def serve(model: Any, token: str, host: str = "127.0.0.1", port: int = 8765, most: int = 8) -> None:
    """Serve a model until interrupted; on this machine alone, unless `host` says otherwise.

    Whoever knows `token` may use it; the connection is not encrypted: put it behind a proxy that
    does. Raises ValueError as `application` does.
    """
    app = application(Service(model, most), token)
    import uvicorn

    uvicorn.run(app, host=host, port=port, log_level="warning")
