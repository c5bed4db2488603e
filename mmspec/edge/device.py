"""The device's side: drafts of the small model, sent where it is unsure of them."""

from __future__ import annotations

import json
import logging
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.api import Accelerated, accelerate
from mmspec.distributions.categorical import Categorical
from mmspec.draft import Draft, Gate, Round, Scores, Verdict
from mmspec.edge.messages import (
    BEGIN,
    CHECK,
    DRAFTED,
    HELLO,
    RANKS,
    Garbled,
    best_of,
    pack,
    parse,
)
from mmspec.errors import is_whole
from mmspec.targets.tokens.causal import CausalTarget
from mmspec.targets.tokens.context import Context, Request
from mmspec.verifiers.entropy_gate import EntropyGate

log = logging.getLogger("mmspec")
ANSWER = 1 << 20  # most bytes of an answer


class Unreachable(Exception):
    """The service gave no answer that can be used."""


@dataclass(eq=False)
class Link:
    """A service, and what went over the wire."""

    url: str
    token: str = field(repr=False)
    timeout_s: float = 10.0
    sent_bytes: int = 0
    received_bytes: int = 0
    calls: int = 0

    def __post_init__(self) -> None:
        if urllib.parse.urlsplit(self.url).scheme not in ("http", "https"):
            raise ValueError(f"url={self.url!r} is no address; give one, http://127.0.0.1:8765")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s={self.timeout_s} waits for nothing; give seconds")

    def ask(self, path: str, body: bytes) -> dict[str, Any]:
        """Send and wait. Raises Unreachable, saying why."""
        address = self.url.rstrip("/") + path
        headers = {"Authorization": f"Bearer {self.token}"}
        request = urllib.request.Request(address, data=body, headers=headers, method="POST")
        self.sent_bytes += len(body)
        self.calls += 1
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                told = answer.read(ANSWER + 1)
        except urllib.error.HTTPError as error:
            said = error.read(200).decode(errors="replace")
            raise Unreachable(f"{error.code} {said or error.reason}") from None
        except Exception as error:  # whatever a network does
            raise Unreachable(f"{type(error).__name__}: {error}") from None
        self.received_bytes += len(told)
        if len(told) > ANSWER:
            raise Unreachable(f"an answer of more than {ANSWER} bytes")
        try:
            return parse(told)
        except Garbled as error:
            raise Unreachable(str(error)) from None


@dataclass(eq=False)
class Talk:
    """One request, as far as the service has been told of it."""

    link: Link
    inputs: Mapping[str, Tensor]
    room: int
    name: str | None = None
    told: list[int] = field(default_factory=list)  # new tokens that it knows, per row
    sent: Draft | None = None  # what it ranked last
    accepted: list[int] = field(default_factory=list)
    best: list[list[list[int]]] = field(default_factory=list)  # its answer
    is_down: bool = False

    def rank(self, context: Context, draft: Draft, ranks: int, size: int) -> None:
        """Send a draft, and all that was kept since the last one. Raises Unreachable."""
        if self.name is None:
            found = self.link.ask(f"{BEGIN}?room={self.room}", pack(self.inputs)).get("request")
            if not isinstance(found, str):
                raise Unreachable("an answer without the name of a request")
            self.name, self.told = found, [0] * context.batch
            self.accepted = [0] * context.batch
        lengths = draft.mask.sum(-1).tolist() if draft.nodes else [0] * draft.batch
        drafted = [row[:n] for row, n in zip(draft.tokens.tolist(), lengths, strict=True)]
        new = context.emitted()
        message = {
            "request": self.name,
            "accepted": self.accepted,
            "tokens": [row[known:] for row, known in zip(new, self.told, strict=True)],
            "draft": drafted,
            "ranks": ranks,
        }
        answer = self.link.ask(CHECK, json.dumps(message).encode())
        try:
            self.best = best_of(answer.get("best"), drafted, ranks, size)
        except Garbled as error:
            raise Unreachable(str(error)) from None
        self.told = [len(row) for row in new]
        self.sent, self.accepted = draft, [0] * context.batch


@dataclass(frozen=True)
class Escalation(Gate):
    """Keep what the drafter is sure of; send the rest, and keep that too where nobody answers."""

    threshold: float
    ranks: int

    def skip(self, context: Context, draft: Draft) -> Verdict | None:
        kept = EntropyGate(self.threshold).skip(context, draft)
        if kept is not None:
            return kept
        talk: Talk = context.shared["talk"]
        if not talk.is_down:
            try:
                talk.rank(context, draft, self.ranks, context.vocabulary)
                return None
            except Unreachable as error:
                talk.is_down = True
                log.warning(
                    "the service at %s cannot be used (%s); this device finishes the request alone",
                    *(talk.link.url, error),
                )
        return EntropyGate(float("inf")).skip(context, draft)


@dataclass(frozen=True)
class RemoteTarget:
    """What the service says of a draft, as a target: the `ranks` best ids of every place.

    Greedy decoding only, without processors: those would have to run there. Other tokens than the
    best count as impossible, which is all that a `RankLimit` of as many ranks asks.
    """

    local: CausalTarget
    link: Link
    ranks: int
    wants: ClassVar[frozenset[str]] = frozenset()

    @property
    def backbone(self) -> Any:
        return self.local.backbone

    def prefill(self, request: Request) -> Context:
        """Nothing is read, nothing is sent. Raises ValueError for sampling and encoder states."""
        sampling = request.sampling
        if sampling.do_sample or sampling.processors or sampling.places:
            raise ValueError(
                "the service decodes greedily, without logits processors; drop temperature and "
                "the settings that change scores, or use the recipe ugsd with the target here"
            )
        given = dict(request.inputs)
        if given.get("encoder_outputs") is not None:  # the small model's; the service has its own
            features = {n: v for n, v in request.drafter_inputs.items() if v is not None}
            if not features:
                raise ValueError(
                    "the service encodes for itself, and encoder_outputs are what the small model "
                    "made; give the features"
                )
            given |= features
        tensors = {n: v for n, v in given.items() if isinstance(v, Tensor)}
        context = self.local.prefill(request)
        shared = {**context.shared, "talk": Talk(self.link, tensors, request.room)}
        return replace(context, shared=shared)

    def score(self, context: Context, draft: Draft) -> Scores:
        """What was answered about this draft. Raises ValueError where nobody was asked."""
        talk: Talk = context.shared["talk"]
        if talk.sent is not draft:
            raise ValueError(
                "the small model drafts nothing any more and the service gives no answer, so "
                "nobody can say the next token"
            )
        places = draft.nodes + 1
        scores = torch.full((draft.batch, places, context.vocabulary), -torch.inf)
        for row, told in enumerate(talk.best):
            filled = told + [told[-1]] * (places - len(told))  # of places that are padding
            for place, ids in enumerate(filled):
                scores[row, place, ids] = torch.arange(len(ids), 0, -1.0)
        position = context.position()
        if draft.nodes:
            position = torch.cat((position, position + 1 + draft.places()), 1)
        return Scores(Categorical(scores.to(context.device), hard=True), position)

    def keep(self, context: Context, draft: Draft, kept: Round) -> Context:
        """Note what was kept; the service is told with the next draft."""
        talk: Talk = context.shared["talk"]
        if kept.calls:
            talk.accepted = [len(path) for path in kept.path]
        for history, tokens in zip(context.history, kept.tokens, strict=True):
            history.extend(tokens)
        skipped = context.skipped + 1 if kept.skips else 0
        return replace(context, scores=None, finished=kept.finished, skipped=skipped)


def connect(
    model: Any,
    url: str,
    token: str,
    *,
    tau_h: float = 2.0,
    ranks: int = 3,
    timeout_s: float = 10.0,
    **parts: Any,
) -> Accelerated:
    """A small model here whose unsure blocks are checked by a service (UGSD, Xue et al. 2026).

    `tau_h` in nats and `ranks` are those of the recipe `ugsd`; `parts` are as `accelerate` takes
    them. A service that is down, slow or talks nonsense is reported once per request, and the
    device finishes alone: nothing is lost. `link_of(fast)` counts calls and bytes.

    Raises ValueError for an address that is none, for more ranks or longer drafts than a service
    takes, and for a service of another vocabulary.
    """
    if is_whole(ranks) and ranks > RANKS:
        raise ValueError(f"ranks={ranks}, but a service tells {RANKS} at most; give fewer")
    length: Any = parts.get("length")
    if is_whole(length) and length > DRAFTED:
        raise ValueError(f"length={length}, but a service checks {DRAFTED} at most; give fewer")
    link = Link(url, token, timeout_s)
    fast = accelerate(model, "ugsd", drafter=model, tau_h=tau_h, ranks=ranks, **parts)
    bound = fast.session.bound
    _check_service(link, bound.backbone.vocabulary)
    bound.gate = Escalation(tau_h, ranks)
    bound.target = RemoteTarget(bound.target, link, ranks)
    return fast


def _check_service(link: Link, vocabulary: int) -> None:
    try:
        theirs = link.ask(HELLO, b"").get("vocabulary")
    except Unreachable as error:
        log.warning("the service at %s does not answer yet (%s)", link.url, error)
        return
    if theirs != vocabulary:
        raise ValueError(
            f"the service at {link.url} speaks {theirs} tokens and this model {vocabulary}; the "
            "two need one tokenizer"
        )


def link_of(fast: Accelerated) -> Link:
    """Calls and bytes of a connected model so far."""
    target: RemoteTarget = fast.session.bound.target
    return target.link
