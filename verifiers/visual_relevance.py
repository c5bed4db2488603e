"""Verify visually relevant tokens strictly, and the others with a tolerance in position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.distributions.noise import Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.recipe import Kit
from mmspec.verifiers.coupled import target_tokens
from mmspec.verifiers.walk import check_draft

OPTIONS = {"nearest": 16, "relevance": 0.5, "shift": 1}  # of recipes


@dataclass(frozen=True)
class VisualRelevance(Verifier):
    """Accept a drafted token equal to the target's, or a filler that the target predicts nearby.

    LVSpec (Ji et al. 2026, arXiv 2604.05650). A token's relevance is the mean cosine between the
    target's last hidden state at the token and the `nearest` most similar states at visual tokens
    of the prompt. A token of at least `relevance` must be the target's token t_i. Below, it is a
    filler and may be any of t_(i - shift) ... t_(i + shift), the target's tokens at most `shift`
    positions away: the same words, shifted. t is greedy, or sampled with the noise of its position.
    The draft is accepted up to the first token that fails; then follows the target's token.

    Rows without a visual token are verified strictly. Lossy; `relevance=-1` or `shift=0` is
    `Coupled`. The verdict's excess counts accepted tokens that differ from the target's. Chains
    only. Reconstructed: the compared states, the numbers, and that a shift is counted along the
    draft.

    Raises ValueError for fewer than one neighbour, a negative shift, and a relevance that is no
    cosine.
    """

    visual_ids: frozenset[int]
    nearest: int = 16
    relevance: float = 0.5
    shift: int = 1
    anchors: Sequence[Tensor] | None = field(default=None, repr=False, compare=False)
    uses_trees: ClassVar[bool] = False
    looks_ahead: ClassVar[bool] = True
    required_features: ClassVar[frozenset[str]] = frozenset({"hidden"})
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET, Kind.RACE, Kind.IID, Kind.WOR, Kind.HUB)

    def __post_init__(self) -> None:
        if self.nearest < 1:
            raise ValueError(f"nearest={self.nearest} visual tokens; give 1 or more")
        if self.shift < 0:
            raise ValueError(f"shift={self.shift} places; give 0 (exact) or more")
        if not -1 <= self.relevance <= 1:
            raise ValueError(
                f"relevance={self.relevance}, but it is a cosine: -1 (exact) to 1 (all are fillers)"
            )

    @property
    def lossless(self) -> bool:
        return self.shift == 0 or self.relevance == -1

    @property
    def couples(self) -> bool:
        return self.lossless

    @property
    def description(self) -> str:
        return (
            f"the target's own token; below a visual relevance of {self.relevance:g} one of those "
            f"within {self.shift}"
        )

    def bind_context(self, context: Any) -> Verifier:
        shared: dict[str, Any] = context.shared  # of one request, computed once
        if _ANCHORS not in shared:
            shared[_ANCHORS] = self._anchors(context)
        return replace(self, anchors=shared[_ANCHORS])

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check_draft(self, draft, distribution=False)
        if self.anchors is None:
            raise ValueError(
                "relevance depends on visual tokens of the prompt; call within() first"
            )
        own = target_tokens(draft, scores, noise)
        strict = own[:, :-1] == draft.tokens
        passed = strict
        if draft.nodes and not self.lossless:
            states = scores.features["hidden"][: draft.batch, 1:]
            passed = strict | (self._fillers(states) & self._matches_nearby(own, draft.tokens))
        accepted = (passed & draft.mask).long().cumprod(-1)
        length = accepted.sum(-1)
        path = accepted * torch.arange(1, draft.nodes + 1, device=own.device) - 1
        misses = (accepted.bool() & ~strict).sum(-1).double()
        over = None if self.lossless else misses
        return Verdict(path, length, own.gather(1, length[:, None])[:, 0], over)

    def _fillers(self, states: Tensor) -> Tensor:  # (B, N, H) -> (B, N) bool
        assert self.anchors is not None
        rows = []
        for own, anchors in zip(states, self.anchors, strict=True):
            if not len(anchors):
                rows.append(torch.zeros(len(own), dtype=torch.bool, device=own.device))
                continue
            cosines = functional.normalize(own.float(), dim=-1) @ anchors.T
            best = cosines.topk(min(self.nearest, len(anchors)), -1).values
            rows.append(best.mean(-1) < self.relevance)
        return torch.stack(rows)

    def _matches_nearby(
        self, own: Tensor, tokens: Tensor
    ) -> Tensor:  # (B, N + 1), (B, N) -> (B, N)
        """Whether a token equals one of the target's tokens at most `shift` positions away."""
        places = torch.arange(own.shape[1], device=own.device)
        near = (places[None] - places[:-1, None]).abs() <= self.shift  # (N, N + 1)
        return ((own[:, None] == tokens[..., None]) & near).any(-1)

    def _anchors(self, context: Any) -> list[Tensor]:
        """Unit states (n, H) of each row's visual tokens among those read by the prefill."""
        states, ids = context.shared["hidden"], context.request.inputs.get("input_ids")
        states = states[: context.batch]
        if ids is None:
            return [states[0, :0].float()] * context.batch
        marks = torch.tensor(sorted(self.visual_ids), device=ids.device)
        read = min(states.shape[1], ids.shape[1])  # earlier turns are not read again
        is_visual = torch.isin(ids[:, -read:], marks)
        units = functional.normalize(states[:, -read:].float(), dim=-1)
        return [unit[mask] for unit, mask in zip(units, is_visual, strict=True)]


_ANCHORS = "visual-anchors"  # key of `context.shared`


def build_visual_relevance(kit: Kit) -> VisualRelevance:
    """The verifier of the recipe options; a model without visual tokens is verified strictly."""
    ids = frozenset(kit.target.placeholder_ids)
    return VisualRelevance(ids, **{name: kit.options[name] for name in OPTIONS})
