"""Accept a prefix within a small edit distance of the target's tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.noise import Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.errors import check_number
from mmspec.recipe import Kit
from mmspec.verifiers.coupled import target_tokens
from mmspec.verifiers.walk import check_draft


@dataclass(frozen=True)
class EditTolerance(Verifier):
    """Accept the longest prefix of a draft within a share `tau` of edits (HSD, Liao et al. 2026).

    With t_1 .. t_N the target's tokens at the drafted positions (greedy, or sampled with the noise
    of the position), d_1 .. d_k is accepted for the largest k with

        Levenshtein(d_1 .. d_k, t_1 .. t_k) / k <= tau   and   d_k = t_k,

    then follows the target's token. Chains only. Lossy; `tau=0` is `Coupled`: plain decoding with
    the same seed. Reconstructed: the paper compares texts without white space and markup, this
    verifier compares tokens; the paper's unit and tau are not public. The verdict's excess counts
    accepted tokens that differ from the target's.

    Raises ValueError for a tau outside [0, 1].
    """

    tau: float
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET, Kind.RACE, Kind.IID, Kind.WOR, Kind.HUB)
    uses_trees: ClassVar[bool] = False
    looks_ahead: ClassVar[bool] = True  # edits pass only before an equal token

    def __post_init__(self) -> None:
        check_number("tau", self.tau, 0, 1, example=0.1)

    @property
    def lossless(self) -> bool:
        return self.tau == 0

    @property
    def couples(self) -> bool:
        return self.lossless

    @property
    def description(self) -> str:
        return f"longest prefix within {self.tau} edits a token"

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check_draft(self, draft, distribution=False, trees=False)
        own = target_tokens(draft, scores, noise)
        target = own[:, :-1]
        same = (draft.tokens == target) & draft.mask
        count = torch.arange(1, draft.nodes + 1, device=own.device)
        near = edits(draft.tokens, target) <= self.tau * count + 1e-9
        length = torch.where(near & same & draft.mask.cumprod(-1).bool(), count, 0)
        length = length.amax(-1) if draft.nodes else length.sum(-1)
        accepted = count <= length[:, None]
        path = torch.where(accepted, count - 1, -1)
        over = None if self.lossless else (accepted & ~same).sum(-1).double()
        return Verdict(path, length, own.gather(1, length[:, None])[:, 0], over)


def edits(one: Tensor, other: Tensor) -> Tensor:  # (B, N) x2 -> (B, N)
    """Levenshtein distances of all pairs of prefixes of equal length."""
    batch, size = one.shape
    row = torch.arange(size + 1, device=one.device).expand(batch, -1)
    found = []
    for at in range(size):
        replaced = row[:, :-1] + (one[:, at : at + 1] != other)
        best = torch.minimum(replaced, row[:, 1:] + 1)
        best = torch.cat((row.new_full((batch, 1), at + 1), best), 1)
        steps = torch.arange(size + 1, device=one.device)
        row = (best - steps).cummin(-1).values + steps  # insertions, from left to right
        found.append(row[:, at + 1])
    return torch.stack(found, 1) if found else one


def build_edit_tolerance(kit: Kit) -> Verifier:
    """The verifier of the recipe option `tau`."""
    return EditTolerance(kit.options["tau"])
