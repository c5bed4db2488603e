"""The decoding loop of a beam search: propose, score, verify, keep, observe, for N beams a row.

A row of the batch is a request. Its beams share one cache row (`mmspec.targets.branches`), so the
prompt and what all beams have in common are read and stored once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from mmspec.decode import Clock
from mmspec.distributions.noise import Keys
from mmspec.draft import Round, Verdict
from mmspec.drafters.beams import BeamDrafter, NoBeamDraft
from mmspec.targets.branches import BeamDraft, Branches, read_branches
from mmspec.targets.memory import Memory

if TYPE_CHECKING:
    from mmspec._hf_beams import BeamSearch
    from mmspec.targets.tokens.causal import CausalTarget
    from mmspec.targets.tokens.context import Request
    from mmspec.verifiers.beams import BeamVerdict, BeamVerifier

log = logging.getLogger("mmspec")
T = TypeVar("T")


@dataclass(frozen=True)
class BeamParts:
    """What decodes the beams of one request: `searches` are those of its rows, which end done."""

    target: CausalTarget
    drafter: BeamDrafter
    verifier: BeamVerifier
    searches: Sequence[BeamSearch]


def decode_beams(parts: BeamParts, request: Request) -> Iterator[Round]:
    """Decode one request, yielding a `Round` per target call until every search is done.

    Round 0 takes the first beams from the prompt. The tokens of a round are those that its best
    beam has more than before: no token is final before the end. Raises ValueError for a model that
    cannot read branches, once the prompt was read.
    """
    running = _Running(parts, request)
    yield running.first_round()
    while not all(search.is_done for search in parts.searches):
        running.clock.resume()
        yield running.step()


class _Running:
    """A beam search in the loop."""

    def __init__(self, parts: BeamParts, request: Request) -> None:
        self.parts = parts
        self.clock = Clock(request.noise.rows.device)
        self.clock.to("prefill")
        features = parts.target.required_features | {"logits"}
        target = replace(parts.target, required_features=features)
        context = target.prefill(request)
        self.memory: Memory = _check_memory(target.backbone, context.memory, request)
        self.index = 0
        assert context.scores is not None
        logits = context.scores.features["logits"]  # (B, 1, V)
        for search, row in zip(parts.searches, logits, strict=True):
            search.advance(row.expand(search.num_beams, -1))
        self.tree = self._extend(
            Branches.empty(len(logits), logits.device),
            [[-1] * search.num_beams for search in parts.searches],
            [search.tokens for search in parts.searches],
        )
        self.clock.to("draft")
        self.drafter: BeamDrafter = parts.drafter
        self.failure: str | None = None
        self._guard(lambda: self.drafter.begin(context))

    def first_round(self) -> Round:
        return self._round(None, [0] * len(self.parts.searches), self.parts.searches)

    def _guard(self, step: Callable[[], T]) -> T | None:
        """Run a step of the drafter; one that fails does not fail the request."""
        try:
            return step()
        except Exception as error:
            self.failure = f"{type(self.drafter).__name__}: {type(error).__name__}: {error}"
            self.drafter = NoBeamDraft()
            log.warning(
                "the drafter failed; beams without drafts finish this request (%s)", self.failure
            )
            return None

    def step(self) -> Round:
        """One call of the target."""
        parts, clock = self.parts, self.clock
        active = [search for search in parts.searches if not search.is_done]
        clock.to("draft")
        scores = torch.stack([search.scores for search in parts.searches])
        left = [
            0 if search.is_done else search.config.max_length - search.length - 1
            for search in parts.searches
        ]
        keys = [search.noise.key for search in parts.searches if search.noise is not None]
        noise = Keys(torch.stack(keys)) if keys else None
        ids = [search.sequences[0, :, : search.length] for search in parts.searches]
        draft = self._guard(lambda: self.drafter.propose(self.tree, scores, left, ids, noise))
        if draft is None:
            draft = self.drafter.propose(self.tree, scores, left, ids, noise)
        clock.to("verify")
        logits = read_branches(parts.target.backbone, self.memory, draft.tree, draft.first)
        verdict = parts.verifier.verify(parts.searches, draft, logits)
        clock.to("host")
        self._keep(draft, verdict)
        self.index += 1
        return self._round(draft, verdict.accepted, active)

    def _keep(self, draft: BeamDraft, verdict: BeamVerdict) -> None:
        limit, committable = draft.tree.nodes, self.drafter.num_committable
        pruned, kept = draft.tree.prune(
            [parents or [-1] for parents in verdict.parents],
            limit if committable is None else committable,
        )
        kept.move(self.memory, draft.tree.nodes)
        self._guard(lambda: self.drafter.keep(kept))
        places = kept.places()
        parents = [
            [places[row].get(node, -1) for node in nodes] or [-1] * draft.num_beams
            for row, nodes in enumerate(verdict.parents)
        ]
        tokens = [row or [0] * draft.num_beams for row in verdict.tokens]
        self.tree = self._extend(pruned, parents, tokens)

    def _extend(self, tree: Branches, parents: Any, tokens: Any) -> Branches:
        device = tree.tokens.device
        return tree.extend(
            torch.tensor(tokens, device=device), torch.tensor(parents, device=device)
        )

    def _round(
        self, draft: BeamDraft | None, accepted: Sequence[int], active: Sequence[BeamSearch]
    ) -> Round:
        rows = self.parts.searches
        counts = [
            made + 1 if any(row is one for one in active) else 0
            for made, row in zip(accepted, rows, strict=True)
        ]
        none: tuple[tuple[int, ...], ...] = ((),) * len(rows)
        nothing = torch.zeros(len(rows), 0, dtype=torch.int64)
        return Round(
            index=self.index,
            drafted=tuple(0 if draft is None or not n else draft.drafted for n in counts),
            accepted=tuple(accepted),
            path=none,
            takes_next=tuple(n > 0 for n in counts),
            tokens=tuple(
                tuple(row.sequences[0, 0, row.length - n : row.length].tolist())
                for n, row in zip(counts, rows, strict=True)
            ),
            finished=tuple(row.is_done for row in rows),
            verdict=Verdict(nothing, nothing.sum(-1), nothing.sum(-1)),
            depth=0 if draft is None else draft.depth,
            calls=0 if draft is None else 1,
            seconds=self.clock.read(),
            fallback=self.failure,
        )


def _check_memory(reader: Any, memory: Any, request: Request) -> Memory:
    """Raises ValueError for a cache that cannot hold branches as deep as this request's."""
    if not isinstance(memory, Memory) or memory.is_stepwise:
        raise ValueError(
            f"num_beams above 1: {type(reader.model).__name__} is read in its own steps here, so "
            "its cache cannot hold several beams; pass num_beams=1, or use model.generate()"
        )
    if memory.window is not None and memory.window <= request.max_new_tokens:
        raise ValueError(
            f"num_beams above 1: beams of {type(reader.model).__name__} may differ for "
            f"max_new_tokens={request.max_new_tokens} tokens, which is as long as the window of "
            f"its layers ({memory.window}); give fewer tokens, or use model.generate()"
        )
    return memory
