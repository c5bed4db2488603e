"""Verification by one compiled graph.

A verifier runs as it is, on tensors alone, for the first shape of drafts that it meets with a
number of rows; other shapes (near the end of an output) are verified eager. One that reads values
on the host is found while it is traced, and runs eager.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mmspec._attributes import delegate_to
from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import KeyedNoise, Noise
from mmspec.draft import Draft, Scores, Verdict, Verifier
from mmspec.stats import VERIFIER, CompileLog
from mmspec.targets.graphs import Function, GraphSet, parse_backend, trace

_RESULTS = ("path", "length", "next", "excess", "replacements", "resample_mask")


@dataclass(frozen=True)
class CompiledVerifier(Verifier):
    """A verifier of token drafts that runs as a graph."""

    verifier: Verifier
    graphs: GraphSet
    results: dict[Any, list[str]] = field(default_factory=dict)  # of a graph, by name

    lossless = delegate_to("verifier.lossless")
    kinds = delegate_to("verifier.kinds")
    rule = delegate_to("verifier.rule")
    uses_trees = delegate_to("verifier.uses_trees")
    decodes = delegate_to("verifier.decodes")
    looks_ahead = delegate_to("verifier.looks_ahead")
    is_blind = delegate_to("verifier.is_blind")
    needs_random_steps = delegate_to("verifier.needs_random_steps")
    couples = delegate_to("verifier.couples")
    required_features = delegate_to("verifier.required_features")
    description = delegate_to("verifier.description")

    def bind_context(self, context: Any) -> Verifier:
        bound = self.verifier.bind_context(context)
        if bound is self.verifier and not self.required_features:
            return self
        self.graphs.note("it depends on more than the draft and its scores")
        return bound

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        inputs = None if self.graphs.is_refused else _inputs(draft, scores, noise)
        if inputs is None or torch.is_grad_enabled():
            return self.verifier.verify(draft, scores, noise)
        key = _key(draft, scores)
        known = [one for one in self.graphs.graphs if one[0] == key[0]]
        if known and key not in known:
            return self.verifier.verify(draft, scores, noise)

        def make() -> Function:
            function = self._make_function(draft, scores, key)
            function(*inputs)  # makes the constants that it keeps
            return function

        def compare(out: Sequence[Tensor]) -> float | None:
            eager = self.verifier.verify(draft, scores, noise)
            pairs = zip(out, _tensors_of(eager).values(), strict=True)
            alike = all(torch.allclose(ours.double(), one.double()) for ours, one in pairs)
            return None if alike else torch.inf

        out = self.graphs.run(key, make, inputs, tuple, compare)
        if out is None:
            return self.verifier.verify(draft, scores, noise)
        found: dict[str, Any] = dict(zip(self.results[key], out, strict=True))
        return Verdict(**{"next": None, **found})

    def _make_function(self, draft: Draft, scores: Scores, key: Any) -> Function:
        hard, is_drawn = _hardness(draft, scores)

        def verify(
            tokens: Tensor,
            parents: Tensor,
            mask: Tensor,
            p: Tensor,
            q: Tensor | None,
            position: Tensor,
            rows: Tensor,
            starts: Tensor,
        ) -> list[Tensor]:
            drawn = None if q is None else Categorical(q, is_drawn)
            own = replace(draft, tokens=tokens, parents=parents, mask=mask, distribution=drawn)
            made = Scores(Categorical(p, hard), position)
            verdict = self.verifier.verify(own, made, KeyedNoise(rows, 0, starts, num_ahead=1))
            found = _tensors_of(verdict)
            self.results[key] = list(found)
            return list(found.values())

        return verify


def _inputs(draft: Draft, scores: Scores, noise: Noise) -> tuple[Any, ...] | None:
    """The tensors that a verifier reads; None where it may read others."""
    p, q = scores.distribution, draft.distribution
    is_usual = isinstance(p, Categorical) and p.known_probs is None
    is_drawn = q is None or (isinstance(q, Categorical) and q.known_probs is None)
    others = draft.extras is not None or draft.node_inputs is not None
    if others or not (draft.nodes and is_usual and is_drawn and isinstance(noise, KeyedNoise)):
        return None
    own: Any = (p, q)
    starts = torch.zeros_like(noise.rows) if noise.starts is None else noise.starts
    drawn = None if q is None else own[1].scores
    return (
        *(draft.tokens, draft.parents, draft.mask, own[0].scores, drawn),
        *(scores.position, noise.rows, starts - noise.round),
    )


def _key(draft: Draft, scores: Scores) -> tuple[int, Any]:
    """The number of rows, and what else differs between graphs."""
    shape = (draft.nodes, draft.tree, draft.kind, draft.padded, draft.max_depth)
    return draft.batch, (*shape, *_hardness(draft, scores), scores.position.shape)


def _hardness(draft: Draft, scores: Scores) -> tuple[bool, bool]:
    """Whether the target's distributions, and the drafter's, are point masses."""
    p: Any = scores.distribution
    q: Any = draft.distribution
    return p.hard, q is not None and q.hard


def _tensors_of(verdict: Verdict) -> dict[str, Tensor]:
    found = {name: getattr(verdict, name) for name in _RESULTS}
    return {name: one for name, one in found.items() if one is not None}


def compile_verifier(verifier: Verifier, log: CompileLog, option: bool | str) -> Verifier:
    """The verifier, run as one graph."""
    name = type(verifier).__name__
    graphs = GraphSet(name, log, parse_backend(option), VERIFIER, 0, tracer=trace)
    return CompiledVerifier(verifier, graphs)
