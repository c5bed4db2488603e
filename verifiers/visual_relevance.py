"""Words that speak of the picture are checked strictly, the others also by their neighbours."""

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
from mmspec.verifiers.walk import check

OPTIONS = {"nearest": 16, "relevance": 0.5, "shift": 1}  # of recipes, as `by_relevance` reads them


@dataclass(frozen=True)
class VisualRelevance(Verifier):
    """Keep a drafted token that is the target's own, or a filler that the target says close by.

    LVSpec (Ji et al. 2026, arXiv 2604.05650). A token's relevance is the mean cosine between the
    target's last hidden state behind it and the `nearest` of those at visual tokens of the prompt.
    From `relevance` on it must be the target's token t_i. Below, it is a filler and may be any of
    t_(i - shift) ... t_(i + shift), what the target says at most `shift` places before or behind:
    the words are the same, moved. t is greedy, or drawn with the noise of its position. The draft
    is kept up to the first token that fails; then follows the target's own token.

    Rows without a visual token are checked strictly. Lossy; `relevance=-1` or `shift=0` is
    `Coupled`. The verdict's excess counts kept tokens that are not the target's. Chains only.
    Reconstructed: whose states are compared, the numbers, and that a shift is counted along the
    draft.

    Raises ValueError for fewer than one neighbour, a negative shift, and what is no cosine.
    """

    visual_ids: frozenset[int]
    nearest: int = 16
    relevance: float = 0.5
    shift: int = 1
    anchors: Sequence[Tensor] | None = field(default=None, repr=False, compare=False)
    trees: ClassVar[bool] = False
    looks_ahead: ClassVar[bool] = True
    wants: ClassVar[frozenset[str]] = frozenset({"hidden"})
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
    def words(self) -> str:
        return (
            f"the target's own token; below a visual relevance of {self.relevance:g} one of those "
            f"within {self.shift}"
        )

    def within(self, context: Any) -> Verifier:
        shared: dict[str, Any] = context.shared  # of one request: read there once
        if _ANCHORS not in shared:
            shared[_ANCHORS] = self._anchors(context)
        return replace(self, anchors=shared[_ANCHORS])

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check(self, draft, distribution=False)
        if self.anchors is None:
            raise ValueError("relevance goes by visual tokens of the prompt; call within() first")
        own = target_tokens(draft, scores, noise)
        strict = own[:, :-1] == draft.tokens
        passed = strict
        if draft.nodes and not self.lossless:
            states = scores.features["hidden"][: draft.batch, 1:]
            passed = strict | (self._fillers(states) & self._shifted(own, draft.tokens))
        kept = (passed & draft.mask).long().cumprod(-1)
        length = kept.sum(-1)
        path = kept * torch.arange(1, draft.nodes + 1, device=own.device) - 1
        misses = (kept.bool() & ~strict).sum(-1).double()
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

    def _shifted(self, own: Tensor, tokens: Tensor) -> Tensor:  # (B, N + 1), (B, N) -> (B, N)
        """Whether the target says a token at most `shift` places away along the draft."""
        places = torch.arange(own.shape[1], device=own.device)
        near = (places[None] - places[:-1, None]).abs() <= self.shift  # (N, N + 1)
        return ((own[:, None] == tokens[..., None]) & near).any(-1)

    def _anchors(self, context: Any) -> list[Tensor]:
        """Unit states (n, H) of each row's visual tokens in what the prefill has read."""
        states, ids = context.shared["hidden"], context.request.inputs.get("input_ids")
        states = states[: context.batch]
        if ids is None:
            return [states[0, :0].float()] * context.batch
        marks = torch.tensor(sorted(self.visual_ids), device=ids.device)
        read = min(states.shape[1], ids.shape[1])  # of an earlier turn nothing is read anew
        seen = torch.isin(ids[:, -read:], marks)
        units = functional.normalize(states[:, -read:].float(), dim=-1)
        return [unit[mask] for unit, mask in zip(units, seen, strict=True)]


_ANCHORS = "visual-anchors"  # in what a request shares


def by_relevance(kit: Kit) -> VisualRelevance:
    """The rule of a recipe's options; a model that sees nothing is checked strictly."""
    ids = frozenset(kit.target.placeholder_ids)
    return VisualRelevance(ids, **{name: kit.options[name] for name in OPTIONS})
