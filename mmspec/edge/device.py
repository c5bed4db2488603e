"""Device side: drafts of the small model, sent to the service where it is uncertain."""

from __future__ import annotations

import json
import logging
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.accelerated import Accelerated
from mmspec.api import accelerate
from mmspec.distributions.categorical import Categorical
from mmspec.draft import Draft, Gate, Round, Scores, Verdict
from mmspec.edge.messages import (
    BEGIN,
    CHECK,
    HELLO,
    MAX_DRAFT_TOKENS,
    MAX_RANKS,
    InvalidMessage,
    check_best_ids,
    check_size,
    pack,
    parse,
)
from mmspec.errors import check_number, is_http_address, is_integer
from mmspec.serving.limits import check_token
from mmspec.targets.tokens.causal import CausalTarget
from mmspec.targets.tokens.context import Context, Request
from mmspec.verifiers.entropy_gate import EntropyGate

log = logging.getLogger("mmspec")
MAX_RESPONSE_BYTES = 1 << 20  # of one response


class ServiceUnavailable(Exception):
    """The service gave no usable response."""


class RequestDropped(ServiceUnavailable):
    """The service no longer has the request."""


@dataclass(eq=False)
class Link:
    """Connection to a service, with counts of calls and bytes."""

    url: str
    token: str = field(repr=False)
    timeout_s: float = 10.0
    sent_bytes: int = 0
    received_bytes: int = 0
    calls: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.url, str) or not is_http_address(self.url):
            raise ValueError(
                f"url={self.url!r} is not an http(s) address; give one such as http://127.0.0.1:8765"
            )
        check_token(self.token)
        check_number("timeout_s", self.timeout_s, 1e-3, 86400, example=10)

    def post(self, path: str, body: bytes) -> dict[str, Any]:
        """Send a request and return the response. Raises ServiceUnavailable with the reason."""
        address = self.url.rstrip("/") + path
        headers = {"Authorization": f"Bearer {self.token}"}
        request = urllib.request.Request(address, data=body, headers=headers, method="POST")
        self.sent_bytes += len(body)
        self.calls += 1
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                content = response.read(MAX_RESPONSE_BYTES + 1)
        except urllib.error.HTTPError as error:
            kind = RequestDropped if error.code == 404 else ServiceUnavailable
            raise kind(f"{error.code} {_read_detail(error) or error.reason}") from None
        except Exception as error:  # any network failure
            raise ServiceUnavailable(f"{type(error).__name__}: {error}") from None
        self.received_bytes += len(content)
        if len(content) > MAX_RESPONSE_BYTES:
            raise ServiceUnavailable(f"a response of more than {MAX_RESPONSE_BYTES} bytes")
        try:
            return parse(content)
        except InvalidMessage as error:
            raise ServiceUnavailable(str(error)) from None


@dataclass(eq=False)
class RemoteRequest:
    """State of one request at the service."""

    link: Link
    inputs: Mapping[str, Tensor]
    max_new_tokens: int
    name: str | None = None
    sent_lengths: list[int] = field(default_factory=list)  # new tokens sent so far, per row
    sent: Draft | None = None  # the last ranked draft
    accepted: list[int] = field(default_factory=list)
    best: list[list[list[int]]] = field(default_factory=list)  # ranked ids of the last draft
    is_down: bool = False

    def rank(self, context: Context, draft: Draft, ranks: int, size: int) -> None:
        """Send a draft and the tokens accepted since the last one. Raises ServiceUnavailable.

        A request that the service has dropped is sent again as a whole, with all its tokens.
        """
        lengths = draft.mask.sum(-1).tolist() if draft.nodes else [0] * draft.batch
        drafted = [row[:n] for row, n in zip(draft.tokens.tolist(), lengths, strict=True)]
        new = context.generated_tokens()
        response = self._check(new, drafted, ranks) or self._begin(new, drafted, ranks)
        try:
            self.best = check_best_ids(response.get("best"), drafted, ranks, size)
        except InvalidMessage as error:
            raise ServiceUnavailable(str(error)) from None
        self.sent_lengths = [len(row) for row in new]
        self.sent, self.accepted = draft, [0] * context.batch

    def _check(
        self, new: list[list[int]], drafted: list[list[int]], ranks: int
    ) -> dict[str, Any] | None:
        """The response to a draft; None if the service does not have the request."""
        if self.name is None:
            return None
        message = self._message(new, drafted, ranks) | {"request": self.name}
        try:
            return self.link.post(CHECK, json.dumps(message).encode())
        except RequestDropped:
            return None

    def _begin(self, new: list[list[int]], drafted: list[list[int]], ranks: int) -> dict[str, Any]:
        """The response to the request with its first draft."""
        self.sent_lengths = self.accepted = [0] * len(new)
        body = pack(self.inputs, self._message(new, drafted, ranks))
        response = self.link.post(f"{BEGIN}?room={self.max_new_tokens}", body)
        self.name = response.get("request")
        if not isinstance(self.name, str):
            raise ServiceUnavailable("a response without the id of a request")
        return response

    def _message(
        self, new: list[list[int]], drafted: list[list[int]], ranks: int
    ) -> dict[str, Any]:
        return {
            "known": self.sent_lengths,
            "accepted": self.accepted,
            "tokens": [row[known:] for row, known in zip(new, self.sent_lengths, strict=True)],
            "draft": drafted,
            "ranks": ranks,
        }


@dataclass(frozen=True)
class Escalation(Gate):
    """Accept drafts of low entropy; send others, and accept them too without a service."""

    threshold: float
    ranks: int

    def skip(self, context: Context, draft: Draft) -> Verdict | None:
        verdict = EntropyGate(self.threshold).skip(context, draft)
        if verdict is not None:
            return verdict
        remote: RemoteRequest = context.shared["remote_request"]
        if not remote.is_down:
            try:
                remote.rank(context, draft, self.ranks, context.vocabulary)
                return None
            except ServiceUnavailable as error:
                remote.is_down = True
                log.warning(
                    "the service at %s cannot be used (%s); this device finishes the request alone",
                    *(remote.link.url, error),
                )
        return EntropyGate(float("inf")).skip(context, draft)


@dataclass(frozen=True)
class RemoteTarget:
    """The service as a target: the `ranks` best token ids at every position of a draft.

    Greedy decoding only, without logits processors, which the service does not run. All other
    tokens are impossible, which suffices for a `RankLimit` of as many ranks.
    """

    local: CausalTarget
    link: Link
    ranks: int
    required_features: ClassVar[frozenset[str]] = frozenset()

    @property
    def backbone(self) -> Any:
        return self.local.backbone

    def prefill(self, request: Request) -> Context:
        """Prepare a request without reading or sending it. Raises ValueError for sampling."""
        sampling = request.sampling
        if sampling.do_sample or sampling.processors or sampling.position_processors:
            raise ValueError(
                "the service decodes greedily, without logits processors; drop temperature and "
                "the settings that change scores, or use the recipe ugsd with a local target"
            )
        given = dict(request.inputs)
        if given.get("encoder_outputs") is not None:  # of the small model
            features = {n: v for n, v in request.drafter_inputs.items() if v is not None}
            if not features:
                raise ValueError(
                    "the service runs its own encoder, and encoder_outputs are the small model's; "
                    "give the features"
                )
            given |= features
        tensors = {n: v for n, v in given.items() if isinstance(v, Tensor)}
        if "input_ids" in tensors:
            rows, tokens = tensors["input_ids"].shape
            check_size(rows, tokens, request.max_new_tokens)
        context = self.local.prefill(request)
        shared = {
            **context.shared,
            "remote_request": RemoteRequest(self.link, tensors, request.max_new_tokens),
        }
        return replace(context, shared=shared)

    def score(self, context: Context, draft: Draft) -> Scores:
        """Return the service's ranks of this draft; without a service, the small model's scores."""
        remote: RemoteRequest = context.shared["remote_request"]
        if remote.is_down:  # nothing was drafted; its tokens are unverified
            return replace(self.local.score(context, draft), calls=0)
        positions = draft.nodes + 1
        scores = torch.full((draft.batch, positions, context.vocabulary), -torch.inf)
        for row, best in enumerate(remote.best):
            padded = best + [best[-1]] * (positions - len(best))
            for index, ids in enumerate(padded):
                scores[row, index, ids] = torch.arange(len(ids), 0, -1.0)
        position = context.position()
        if draft.nodes:
            position = torch.cat((position, position + 1 + draft.relative_positions()), 1)
        return Scores(Categorical(scores.to(context.device), hard=True), position)

    def keep(self, context: Context, draft: Draft, round_: Round) -> Context:
        """Record accepted tokens; they are sent with the next draft."""
        remote: RemoteRequest = context.shared["remote_request"]
        if remote.is_down:
            kept = self.local.keep(context, draft, replace(round_, calls=any(round_.takes_next)))
            return replace(kept, num_unverified_rounds=context.num_unverified_rounds + 1)
        if round_.calls:
            remote.accepted = [len(path) for path in round_.path]
        for history, tokens in zip(context.history, round_.tokens, strict=True):
            history.extend(tokens)
        skipped = context.num_unverified_rounds + 1 if round_.is_unverified else 0
        return replace(
            context, scores=None, finished=round_.finished, num_unverified_rounds=skipped
        )


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
    """Accelerate a small model whose uncertain blocks a service verifies (UGSD, Xue et al. 2026).

    `tau_h` (nats) and `ranks` are options of the recipe `ugsd`; `parts` are those of `accelerate`.
    A service that is down, slow or sends invalid responses is reported once per request, and the
    device finishes the request alone. `link_of(fast)` counts calls and bytes.

    Raises ValueError for an invalid address or token, for more ranks or longer drafts than a
    service accepts, and for a service with another vocabulary.
    """
    if is_integer(ranks) and ranks > MAX_RANKS:
        raise ValueError(f"ranks={ranks}, but a service returns {MAX_RANKS} at most; give fewer")
    length: Any = parts.get("length")
    if is_integer(length) and length > MAX_DRAFT_TOKENS:
        raise ValueError(
            f"length={length}, but a service checks {MAX_DRAFT_TOKENS} at most; give fewer"
        )
    link = Link(url, token, timeout_s)
    fast = accelerate(model, "ugsd", drafter=model, tau_h=tau_h, ranks=ranks, **parts)
    bound = fast.session.bound
    _check_service(link, bound.backbone.vocabulary)
    bound.gate = Escalation(tau_h, ranks)
    bound.target = RemoteTarget(bound.target, link, ranks)
    return fast


def _read_detail(error: urllib.error.HTTPError) -> str:
    try:
        return error.read(200).decode(errors="replace")
    except OSError:  # the connection broke within the body
        return ""


def _check_service(link: Link, vocabulary: int) -> None:
    try:
        size = link.post(HELLO, b"").get("vocabulary")
    except ServiceUnavailable as error:
        log.warning("the service at %s does not respond yet (%s)", link.url, error)
        return
    if size != vocabulary:
        raise ValueError(
            f"the service at {link.url} has {size} tokens and this model {vocabulary}; both "
            "need the same tokenizer"
        )


def link_of(fast: Accelerated) -> Link:
    """Return the connection of a model, with its calls and bytes so far."""
    target: RemoteTarget = fast.session.bound.target
    return target.link
