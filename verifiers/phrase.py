"""Joint verification of phrases; all other tokens are tested one by one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.codes.grid import Grid
from mmspec.codes.phrases import Trie
from mmspec.distributions.categorical import as_categorical
from mmspec.distributions.noise import Lane, Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.verifiers.exact import Exact
from mmspec.verifiers.walk import check_draft, proposals, verify_empty


@dataclass(frozen=True)
class PhraseJoint(Verifier):
    """Accept the longest known phrase with min(1, prod p/q), else its tokens one by one.

    SJD-PV, Yu et al. 2026; reconstructed: the longest match within a row of the grid, if there is
    one, and token-wise tests of a rejected phrase up to its end, with `Exact`. Tokens whose
    distribution is a point mass were never scored and take part in no phrase. Lossy: a rejected
    phrase gets a second test under the same q. An empty trie is `Recursive` on a chain, sample for
    sample, and so exact.
    """

    trie: Trie
    grid: Grid | None = field(default=None, repr=False, compare=False)
    offsets: tuple[int, ...] = field(default=(), repr=False, compare=False)  # new tokens per row
    uses_trees: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.IID,)

    @property
    def lossless(self) -> bool:
        return not self.trie.longest

    def bind_context(self, context: Any) -> Verifier:
        offsets = tuple(context.num_generated(row) for row in range(context.batch))
        return replace(self, grid=context.shared.get("grid"), offsets=offsets)

    def remaining_cells(self, tokens: Tensor) -> Tensor | None:  # (B, N) -> (B, N)
        """The number of cells left in the row of each position; None without a grid."""
        if self.grid is None:
            return None
        first = torch.tensor(self.offsets, device=tokens.device)[:, None] - len(self.grid.header)
        offset = first + torch.arange(tokens.shape[1], device=tokens.device)
        return self.grid.width - offset % self.grid.period

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check_draft(self, draft, trees=False)
        if not draft.nodes:
            return verify_empty(scores, noise)
        p = as_categorical(scores.distribution).evaluate()
        q = proposals(draft, p.probs)
        q_prob = q.prob(draft.tokens)
        phrase = self.trie.matches(
            draft.tokens, draft.mask & (q_prob < 1), self.remaining_cells(draft.tokens)
        )
        ratio = p[:, :-1].prob(draft.tokens).log() - q_prob.log()
        whole = noise.flip(joint(ratio, phrase, self.trie.longest), Lane.WALK) & (phrase > 0)
        single = noise.flip(Exact().accept(p[:, :-1], q, draft.tokens), Lane.ACCEPT) & draft.mask
        length = count_accepted(whole, single, phrase)
        rows = torch.arange(draft.batch, device=phrase.device)
        stop = length.clamp_max(draft.nodes - 1)
        failed = (length < draft.nodes) & draft.mask[rows, stop]
        end = p[rows, length]
        left = Exact().residual(end, q[rows, stop], draft.tokens[rows, stop]).probs
        index = torch.arange(draft.nodes, device=phrase.device)
        path = torch.where(index < length[:, None], index, -1)
        weights = torch.where(failed[:, None], left, end.probs)
        return Verdict(path, length, noise.pick(weights, Lane.RESIDUAL))


def joint(log_ratio: Tensor, phrase: Tensor, longest: int) -> Tensor:  # (B, N) x2 -> (B, N)
    """min(1, prod p/q) over the phrase that begins at each position; 1 where none does."""
    total = torch.zeros_like(log_ratio)
    width = log_ratio.shape[1]
    for step in range(min(longest, width)):
        inside = phrase[:, : width - step] > step
        total[:, : width - step] += torch.where(inside, log_ratio[:, step:], 0)
    return total.clamp_max(0).exp()


def count_accepted(whole: Tensor, single: Tensor, phrase: Tensor) -> Tensor:  # (B, N) x3 -> (B,)
    """The number of accepted tokens; phrases are tested wherever none was just rejected."""
    at = torch.zeros_like(phrase[:, 0])  # the next position to be tested
    refused = torch.zeros_like(at)  # token-wise tests before this position
    for place in range(phrase.shape[1]):
        here, size = at == place, phrase[:, place]
        tried = here & (size > 0) & (refused <= place)
        taken = tried & whole[:, place]
        refused = torch.where(tried & ~taken, place + size, refused)
        at = torch.where(taken, place + size, at + (here & ~taken & single[:, place]))
    return at
