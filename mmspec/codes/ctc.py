"""What a CTC head says of a sound: labels, where they stand, how sure it is, how likely a text is.

Log-domain throughout; frames T, labels V, among them one blank. A path is collapsed by joining
equal neighbours and dropping blanks: a a _ a b b _ says a a b.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Confidence = Literal["max", "mean", "min"]
IMPOSSIBLE = -1e3  # log-probabilities below count as this one: e^-1000 is 0, and sums stay finite


@dataclass(frozen=True)
class Run:
    """A label and the frames [start, stop) that say it."""

    label: int
    start: int
    stop: int


@dataclass(frozen=True)
class Uncertainty:
    """How unsure a drafter was of a whole draft, where its distributions do not tell (`Draft.extras`)."""

    nats: Tensor  # (B,) float


def collapse(path: Sequence[int], blank: int = 0) -> list[int]:
    """The labels of a path of frames."""
    return [run.label for run in runs(path, blank)]


def runs(path: Sequence[int], blank: int = 0) -> list[Run]:
    """The labels of a path with their frames, in order."""
    found: list[Run] = []
    start = 0
    for frame in range(1, len(path) + 1):
        if frame == len(path) or path[frame] != path[start]:
            if path[start] != blank:
                found.append(Run(path[start], start, frame))
            start = frame
    return found


def greedy(log_probs: Tensor, seen: Tensor | None = None, blank: int = 0) -> list[list[Run]]:
    """The likeliest path of every row of (B, T, V), collapsed; `seen` (B, T) hides padding."""
    best = log_probs.argmax(-1)
    if seen is not None:
        best = best.masked_fill(~seen, blank)
    return [runs(path, blank) for path in best.tolist()]


def confidences(
    log_probs: Tensor, said: Sequence[Run], how: Confidence = "max"
) -> Tensor:  # (T, V) -> (U,)
    """How sure the frames of a run are of its label.

    The surest frame (Mask-CTC, Higuchi et al. 2020), their mean probability, or the least sure one.
    """
    if not said:
        return log_probs.new_zeros(0)
    spans = [log_probs[one.start : one.stop, one.label].exp() for one in said]
    pooled: dict[Confidence, Callable[[Tensor], Tensor]] = {
        "max": torch.max,
        "mean": torch.mean,
        "min": torch.min,
    }
    return torch.stack([pooled[how](span) for span in spans])


def entropies(log_probs: Tensor) -> Tensor:  # (..., V) -> (...), nats
    """Shannon entropy of every frame."""
    found: Tensor = torch.special.entr(log_probs.exp()).sum(-1)
    return found


def uncertainty(
    log_probs: Tensor, seen: Tensor | None = None, blank: int | None = None
) -> Tensor:  # (B, T, V), (B, T) -> (B,), nats
    """The highest entropy of any frame of a row (CTC-SSD, Saon et al. 2026).

    Frames off `seen` are padding. With `blank` only those frames count whose likeliest label is
    another: frames between labels, which dominate otherwise, are left out. A row without a frame
    that counts is infinitely uncertain.
    """
    found = entropies(log_probs)
    if seen is not None:
        found = found.masked_fill(~seen, -torch.inf)
    if blank is not None:
        found = found.masked_fill(log_probs.argmax(-1) == blank, -torch.inf)
    highest = found.amax(-1)
    return highest.masked_fill(highest.isneginf(), torch.inf)


def align(log_probs: Tensor, labels: Sequence[int], blank: int = 0) -> list[Run]:  # (T, V)
    """The frames of given labels on their likeliest path, by torchaudio's forced alignment.

    Raises ValueError where there are not as many frames as the labels need.
    """
    from torchaudio.functional import forced_align

    repeated = sum(a == b for a, b in zip(labels[1:], labels, strict=False))
    if len(log_probs) < len(labels) + repeated:
        raise ValueError(
            f"{len(labels)} labels, {repeated} of them repeated, need {len(labels) + repeated} "
            f"frames, but there are {len(log_probs)}; give a shorter text or a longer sound"
        )
    if not labels:
        return []
    target = torch.tensor([list(labels)], dtype=torch.int32, device=log_probs.device)
    path, _ = forced_align(log_probs[None].float(), target, blank=blank)
    return runs(path[0].tolist(), blank)


class PrefixScorer:
    """The probability that a sound begins with some labels (Watanabe et al. 2017, algorithm 2).

    Of the prefix h that was pushed so far, `score` gives log psi(h c), the probability of all texts
    that begin with h and c, `end` that of h itself. The sum over all c of psi(h c), and psi(h end),
    make psi(h). States are kept per label, so `pop` costs nothing. `log_probs` is (T, V), padding
    left out. Double precision; one row.
    """

    def __init__(self, log_probs: Tensor, blank: int = 0) -> None:
        self.frames = log_probs.double().clamp_min(IMPOSSIBLE)  # (T, V)
        self.blank = blank
        silent = self.frames[:, blank].cumsum(0)
        empty = torch.cat((silent.new_zeros(1), silent))
        self.stack = [(torch.full_like(empty, -torch.inf), empty)]  # after t frames, t = 0 .. T
        self.labels: list[int] = []
        self.scores = [0.0]  # log psi of every prefix

    def score(self, labels: Tensor) -> Tensor:  # (n,) -> (n,)
        """log psi(h c) for some labels c; -inf for the blank. O(T) each."""
        reached = self._reached(labels)  # (T, n)
        found = (reached + self.frames[:, labels]).logsumexp(0)
        return found.masked_fill(labels == self.blank, -torch.inf)

    def end(self) -> float:
        """log psi(h end): the sound says h and nothing else."""
        ends, blanks = self.stack[-1]
        return float(torch.logaddexp(ends[-1], blanks[-1]))

    @property
    def total(self) -> float:
        """log psi(h)."""
        return self.scores[-1]

    def push(self, label: int) -> None:
        """Go on to h and this label. Raises ValueError for the blank."""
        if label == self.blank:
            raise ValueError(f"label {label} is the blank, which no text holds")
        chosen = torch.tensor([label], device=self.frames.device)
        reached = self._reached(chosen)[:, 0]
        said = _accumulated(reached, self.frames[:, label])
        before = said[:-1]
        quiet = _accumulated(before, self.frames[:, self.blank])
        self.scores.append(float(self.score(chosen)[0]))
        self.stack.append((said, quiet))
        self.labels.append(label)

    def pop(self, count: int = 1) -> None:
        """Take the last labels back. Raises ValueError for more than there are."""
        if count > len(self.labels):
            raise ValueError(f"{count} labels cannot be taken back: there are {len(self.labels)}")
        for kept in (self.stack, self.labels, self.scores):
            del kept[len(kept) - count :]

    def _reached(self, labels: Tensor) -> Tensor:  # (n,) -> (T, n)
        """log-probability that h was said before frame t, so that c may begin there."""
        ends, blanks = (state[:-1] for state in self.stack[-1])
        either = torch.logaddexp(ends, blanks)[:, None].expand(-1, len(labels)).clone()
        if self.labels:  # a label that repeats the last one needs a blank between
            either[:, labels == self.labels[-1]] = blanks[:, None]
        return either


def _accumulated(entering: Tensor, staying: Tensor) -> Tensor:  # (T,) x2 -> (T + 1,)
    """x_t = logaddexp(x_{t-1}, entering_t) + staying_t from x_0 = -inf, as one running sum."""
    upto = staying.cumsum(0)
    before = upto - staying
    inner = torch.logcumsumexp(entering - before, 0) + upto
    return torch.cat((inner.new_full((1,), -torch.inf), inner))
