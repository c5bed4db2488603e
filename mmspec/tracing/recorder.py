"""Record the rounds of a request with their tensors, which are read once, after the last round.

While the request is decoded nothing is read from the device beside the one transfer of a round:
tokens, probabilities and ranks of a draft stay there, a few small tensors per round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical, probs_of_tokens
from mmspec.draft import Draft, Round, Scores

DIGITS = 4  # of probabilities and seconds
MAX_STATES = 24  # states of a denoising chain that are kept, evenly spread
Json = dict[str, Any]
_NO_ROW: Json = {
    **{"tokens": [], "accepted": 0, "corrected": False},
    **{"draft": [], "parents": [], "path": []},
}


@dataclass(frozen=True)
class DraftRecord:
    """The tensors of one draft, on the device."""

    tokens: Tensor  # (B, N), frames (B, N, K); of states their depths
    parents: Tensor | Sequence[int]  # (B, N), or of every row
    mask: Tensor | None  # (B, N)
    p: Tensor | None  # (B, N) the target's probability of each token
    q: Tensor | None  # (B, N) the drafter's
    rank: Tensor | None  # (B, N) of the token in p, 1 = the best


@dataclass
class RoundRecord:
    """One round: what the host knows of it, and its draft."""

    part: int  # the call of the loop that it belongs to: a window of a recording, an action
    round: Round
    draft: DraftRecord | None = None


@dataclass
class RoundRecorder:
    """Records all rounds of a request: `watch` is called within a round, `add` after it."""

    records: list[RoundRecord] = field(default_factory=list)
    states: list[dict[int, Tensor]] = field(default_factory=list)  # per row, by step
    kind: str = "ids"  # of tokens: "ids", "frames" (ids per codebook), "states" (steps)
    part: int = -1
    latest: DraftRecord | None = None

    def begin_part(self) -> None:
        """Start another call of the loop of the same request."""
        self.part += 1
        self.latest = None

    def watch(
        self, draft: Draft, scores: Scores | None, round_: Round, probs: Callable[[], Tensor | None]
    ) -> None:
        """Keep the tensors of a round (`mmspec.decode.Watch`)."""
        if draft.tokens.is_floating_point():
            self.kind = "states"
        elif draft.tokens.dim() > 2:
            self.kind = "frames"
        self.latest = record_draft(draft, scores, probs) if draft.nodes else None

    def add(self, round_: Round) -> None:
        """Add the round that was watched last; its verdict and views are not kept."""
        if self.kind == "states":
            self._keep_states(round_)
        record = RoundRecord(max(self.part, 0), round_, self.latest)
        self.records.append(record)
        self.latest = None

    def _keep_states(self, round_: Round) -> None:
        """Keep some states of every chain; where too many are kept, every second is dropped."""
        self.states = self.states or [{} for _ in round_.tokens]
        for row, new in enumerate(round_.tokens):
            kept = self.states[row]
            done = max(kept, default=0)
            kept |= {done + 1 + index: state.clone() for index, state in enumerate(new)}
            while len(kept) > MAX_STATES:
                for step in sorted(kept)[:-1:2]:
                    del kept[step]

    def read(self) -> list[Json]:
        """All rounds as plain data; the only transfers of a trace, a fixed number of them."""
        drafts = iter(read_drafts([one.draft for one in self.records if one.draft is not None]))
        accepted = self._read_tokens()
        done: dict[tuple[int, int], int] = {}  # tokens so far, by part and row
        made = []
        batch = max((len(one.round.tokens) for one in self.records), default=0)
        for number, record in enumerate(self.records):
            draft = None if record.draft is None else next(drafts)
            rows = []
            for row in range(len(record.round.tokens)):
                first = done.get((record.part, row), 0)
                tokens = [next(accepted) for _ in record.round.tokens[row]]
                done[record.part, row] = first + len(tokens)
                rows.append({"tokens": tokens, **_describe_row(record.round, row, draft)})
                if self.kind == "states":
                    _number_states(rows[-1], first + 1)
            rows += [dict(_NO_ROW) for _ in range(batch - len(rows))]  # of a part with fewer
            made.append({**_describe_round(number, record), "rows": rows})
        return made

    def _read_tokens(self) -> Iterator[Any]:
        """All accepted tokens; frames are transferred at once."""
        every = [one for record in self.records for row in record.round.tokens for one in row]
        return iter(torch.stack(every).tolist() if self.kind == "frames" and every else every)


def record_draft(
    draft: Draft, scores: Scores | None, probs: Callable[[], Tensor | None]
) -> DraftRecord:
    """The tensors of a draft that a trace shows, in memory of their own."""
    parents = draft.parents if draft.tree is None else draft.tree.parents
    tokens = draft.depths() if draft.tokens.is_floating_point() else draft.tokens
    p = q = rank = None
    if scores is not None and isinstance(scores.distribution, Categorical):
        p, rank = _rank_tokens(scores.distribution.scores, draft)
    if isinstance(draft.distribution, Categorical):
        nodes = torch.arange(draft.nodes, device=draft.tokens.device).expand_as(draft.tokens)
        q = probs_of_tokens(draft.distribution.scores, nodes, draft.tokens)
    elif draft.distribution is None:
        q = probs()
    mask = draft.mask if draft.padded else None
    return DraftRecord(tokens.clone(), parents, mask, p, q, rank)


def _rank_tokens(scores: Tensor, draft: Draft) -> tuple[Tensor, Tensor]:  # (B, N) each
    """Probability and rank of every token in the target's distribution after its parent."""
    tokens = draft.tokens.clamp(0, scores.shape[-1] - 1)
    if draft.is_chain:
        own = scores[:, :-1]
    else:
        own = scores[torch.arange(draft.batch, device=scores.device)[:, None], draft.parents + 1]
    chosen = own.gather(-1, tokens[..., None])
    p = (chosen.squeeze(-1) - own.logsumexp(-1)).exp()
    return p, (own > chosen).sum(-1) + 1


def read_drafts(drafts: Sequence[DraftRecord]) -> list[Json]:
    """Plain data of all drafts, one transfer per kind of value."""
    columns = {
        "draft": _read_all([one.tokens for one in drafts]),
        "parents": _read_all([_as_tensor(one.parents, one.tokens) for one in drafts]),
        **{
            name: _read_all([vars(one)[name] for one in drafts])
            for name in ("mask", "p", "q", "rank")
        },
    }
    return [{name: rows[index] for name, rows in columns.items()} for index in range(len(drafts))]


def _as_tensor(parents: Tensor | Sequence[int], like: Tensor) -> Tensor:  # (B, N)
    if isinstance(parents, Tensor):
        return parents.expand(like.shape[:2])
    return torch.tensor(parents, dtype=torch.int64).expand(like.shape[:2])


def _read_all(tensors: Iterable[Tensor | None]) -> list[Any]:
    """Nested lists of tensors of any shapes, in one transfer per device."""
    given = list(tensors)
    flat: dict[torch.device, list[Tensor]] = {}
    for one in given:
        if one is not None:
            flat.setdefault(one.device, []).append(one.reshape(-1))
    read = {device: iter(_split(parts)) for device, parts in flat.items()}
    return [
        None if one is None else next(read[one.device]).view(one.shape).tolist() for one in given
    ]


def _split(parts: Sequence[Tensor]) -> list[Tensor]:
    return list(torch.cat(list(parts)).cpu().split([len(one) for one in parts]))


def _describe_round(number: int, record: RoundRecord) -> Json:
    round_ = record.round
    seconds = {name: round_digits(value) for name, value in round_.seconds.items()}
    made = {"round": number, "part": record.part, "calls": round_.calls, "seconds": seconds}
    return made if round_.fallback is None else {**made, "fallback": round_.fallback}


def _describe_row(round_: Round, row: int, draft: Mapping[str, Any] | None) -> Json:
    own = {"accepted": round_.accepted[row], "corrected": round_.takes_next[row]}
    return {**own, **_describe_draft(draft, row, round_)}


def _number_states(row: Json, first: int) -> None:
    """Name states by the steps of their chain, counted from 1."""
    row["tokens"] = [first + index for index in range(len(row["tokens"]))]
    row["draft"] = [first + depth for depth in row["draft"]]


def _describe_draft(draft: Mapping[str, Any] | None, row: int, round_: Round) -> Json:
    """The proposed nodes of a row, padding left out and parents counted without it."""
    if draft is None or not round_.drafted[row]:
        return {"draft": [], "parents": [], "path": []}
    mask, count = draft["mask"], len(draft["draft"][row])
    kept = [node for node in range(count) if mask is None or mask[row][node]]
    places = {-1: -1} | {node: place for place, node in enumerate(kept)}
    made: Json = {
        "draft": [draft["draft"][row][node] for node in kept],
        "parents": [places[draft["parents"][row][node]] for node in kept],
        "path": [places[node] for node in round_.path[row]],
    }
    for name in ("p", "q", "rank"):
        if draft[name] is not None:
            values = [draft[name][row][node] for node in kept]
            made[name] = values if name == "rank" else [round_digits(one) for one in values]
    return made


def round_digits(value: float) -> float | None:
    """A number with few digits; None where it is not finite, which JSON cannot hold."""
    return float(f"{value:.{DIGITS}g}") if abs(value) < float("inf") else None
