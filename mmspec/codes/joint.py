"""The next token by a CTC head and a decoder together (Watanabe et al. 2017)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.codes.ctc import PrefixScorer


@dataclass(frozen=True, eq=False)
class JointScorer:
    """Scores weight log psi(h v) + (1 - weight) log p(v | h) of what may follow a text h, per row.

    psi is the probability that the sound begins with the labels of h v, and for the end of a text
    that it says h and no more. Only the `most` likeliest tokens of the decoder are compared, and
    the end. A token without labels cannot be heard: nothing but the decoder speaks for it, which
    only a weight of 0 allows. Ties go to the decoder's order.
    """

    scorers: Sequence[PrefixScorer | None]  # None = no sound: the decoder decides alone
    spelled: Callable[[int], Sequence[int]]  # labels of a token; none = it cannot be heard
    end: int
    weight: float
    most: int

    def best(self, row: int, log_probs: Tensor) -> int:  # (V,) of the decoder
        """The best token behind what was pushed."""
        scorer = self.scorers[row]
        if scorer is None or self.weight == 0:
            return int(log_probs.argmax())
        likely = log_probs.topk(min(self.most, len(log_probs))).indices.tolist()
        if self.end not in likely:
            likely.append(self.end)
        likely = [token for token in likely if log_probs[token] > -torch.inf]  # none is ruled out
        heard = [self.heard(row, token) - scorer.total for token in likely]
        said = log_probs[likely].double()
        scores = self.weight * torch.tensor(heard, dtype=torch.float64, device=said.device)
        return int(likely[int((scores + (1 - self.weight) * said).argmax())])

    def heard(self, row: int, token: int) -> float:
        """log psi of what was pushed, and this token."""
        scorer = self.scorers[row]
        assert scorer is not None
        if token == self.end:
            return scorer.end()
        labels = self.spelled(token)
        if not labels:
            return float("-inf")
        for label in labels[:-1]:
            scorer.push(label)
        found = float(scorer.score(torch.tensor([labels[-1]], device=scorer.frames.device))[0])
        scorer.pop(len(labels) - 1)
        return found

    def push(self, row: int, token: int) -> int:
        """Go on to the text with this token; how many labels that took."""
        scorer, labels = self.scorers[row], self.spelled(token)
        if scorer is None:
            return 0
        for label in labels:
            scorer.push(label)
        return len(labels)

    def pop(self, row: int, labels: int) -> None:
        """Take the last labels back."""
        scorer = self.scorers[row]
        if scorer is not None:
            scorer.pop(labels)
