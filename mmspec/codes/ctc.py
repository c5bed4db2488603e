"""CTC outputs: labels and their frames, confidence, and the likelihood of texts.

All in the log domain; frames T, labels V, one of which is the blank. A path is collapsed by merging
equal neighbours and dropping blanks: a a _ a b b _ becomes a a b.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Confidence = Literal["max", "mean", "min"]
IMPOSSIBLE = -1e3  # log-probabilities below count as this one: e^-1000 is 0, and sums stay finite


@dataclass(frozen=True)
class Run:
    """A label and its frames [start, stop)."""

    label: int
    start: int
    stop: int


@dataclass(frozen=True)
class Uncertainty:
    """The uncertainty of whole drafts whose distributions do not give it (`Draft.extras`)."""

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


def greedy(log_probs: Tensor, mask: Tensor | None = None, blank: int = 0) -> list[list[Run]]:
    """The most likely path of every row of (B, T, V), collapsed; `mask` (B, T) excludes padding."""
    best = log_probs.argmax(-1)
    if mask is not None:
        best = best.masked_fill(~mask, blank)
    return [runs(path, blank) for path in best.tolist()]


def confidences(
    log_probs: Tensor, labels: Sequence[Run], reduction: Confidence = "max"
) -> Tensor:  # (T, V) -> (U,)
    """The probability of the label in each run, reduced over its frames.

    The maximum (Mask-CTC, Higuchi et al. 2020), mean or minimum.
    """
    if not labels:
        return log_probs.new_zeros(0)
    spans = [log_probs[one.start : one.stop, one.label].exp() for one in labels]
    pooled: dict[Confidence, Callable[[Tensor], Tensor]] = {
        "max": torch.max,
        "mean": torch.mean,
        "min": torch.min,
    }
    return torch.stack([pooled[reduction](span) for span in spans])


def entropies(log_probs: Tensor) -> Tensor:  # (..., V) -> (...), nats
    """Shannon entropy of every frame."""
    found: Tensor = torch.special.entr(log_probs.exp()).sum(-1)
    return found


def uncertainty(
    log_probs: Tensor, mask: Tensor | None = None, blank: int | None = None
) -> Tensor:  # (B, T, V), (B, T) -> (B,), nats
    """The highest entropy of any frame of a row (CTC-SSD, Saon et al. 2026).

    Frames outside `mask` are padding. With `blank`, frames whose most likely label is the blank are
    excluded; they dominate otherwise. A row without frames has infinite uncertainty.
    """
    found = entropies(log_probs)
    if mask is not None:
        found = found.masked_fill(~mask, -torch.inf)
    if blank is not None:
        found = found.masked_fill(log_probs.argmax(-1) == blank, -torch.inf)
    highest = found.amax(-1)
    return highest.masked_fill(highest.isneginf(), torch.inf)


def align(log_probs: Tensor, labels: Sequence[int], blank: int = 0) -> list[Run]:  # (T, V)
    """The frames of given labels on their most likely path, by torchaudio's forced alignment.

    Raises ValueError for fewer frames than the labels need.
    """
    from torchaudio.functional import forced_align

    repeated = sum(a == b for a, b in zip(labels[1:], labels, strict=False))
    if len(log_probs) < len(labels) + repeated:
        raise ValueError(
            f"{len(labels)} labels, {repeated} of them repeated, need {len(labels) + repeated} "
            f"frames, but there are {len(log_probs)}; give a shorter text or longer audio"
        )
    if not labels:
        return []
    target = torch.tensor([list(labels)], dtype=torch.int32, device=log_probs.device)
    path, _ = forced_align(log_probs[None].float(), target, blank=blank)
    return runs(path[0].tolist(), blank)


def search_prefixes(
    slots: Sequence[Mapping[int, float]], blanks: Sequence[float], beam: int
) -> list[tuple[tuple[int, ...], float]]:
    """The likeliest texts of some slots and their probabilities, by CTC prefix beam search.

    Graves et al. 2006. `slots` are the probabilities of the labels that a slot may hold, `blanks`
    those of its blank. `beam` prefixes are kept per slot; with all of them a probability is the sum
    over all paths that collapse to the text. Most likely first, ties by the order of labels.
    """
    found: dict[tuple[int, ...], tuple[float, float]] = {(): (1.0, 0.0)}  # ends: blank, label
    for labels, blank in zip(slots, blanks, strict=True):
        after: dict[tuple[int, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for text, (ended, is_open) in found.items():
            after[text][0] += (ended + is_open) * blank
            for label, prob in labels.items():
                entering = ended + is_open
                if text and text[-1] == label:  # a repeated label needs a blank in between
                    after[text][1] += is_open * prob
                    entering = ended
                if entering:
                    after[*text, label][1] += entering * prob
        best = sorted(after.items(), key=lambda pair: (-sum(pair[1]), pair[0]))
        found = {text: (by_blank, by_label) for text, (by_blank, by_label) in best[:beam]}
    return [(text, sum(parts)) for text, parts in found.items()]


class PrefixScorer:
    """The probability that an audio begins with some labels (Watanabe et al. 2017, algorithm 2).

    For the pushed prefix h, `score` gives log psi(h c), the probability of all texts that begin
    with h and c, and `end` that of h itself. The sum of psi(h c) over all c and psi(h end) is
    psi(h). States are kept per label, so `pop` costs nothing. `log_probs` is (T, V), without
    padding. Double precision; one row.
    """

    def __init__(self, log_probs: Tensor, blank: int = 0) -> None:
        self.frames = log_probs.double().clamp_min(IMPOSSIBLE)  # (T, V)
        self.blank = blank
        blanks = self.frames[:, blank].cumsum(0)
        empty = torch.cat((blanks.new_zeros(1), blanks))
        self.stack = [(torch.full_like(empty, -torch.inf), empty)]  # after t frames, t = 0 .. T
        self.labels: list[int] = []
        self.scores = [0.0]  # log psi of every prefix

    def score(self, labels: Tensor) -> Tensor:  # (n,) -> (n,)
        """log psi(h c) for some labels c; -inf for the blank. O(T) each."""
        reached = self._log_reach(labels)  # (T, n)
        found = (reached + self.frames[:, labels]).logsumexp(0)
        return found.masked_fill(labels == self.blank, -torch.inf)

    def end(self) -> float:
        """log psi(h end): the audio contains h and nothing else."""
        ends, blanks = self.stack[-1]
        return float(torch.logaddexp(ends[-1], blanks[-1]))

    @property
    def total(self) -> float:
        """log psi(h)."""
        return self.scores[-1]

    def push(self, label: int) -> None:
        """Append a label to h. Raises ValueError for the blank."""
        if label == self.blank:
            raise ValueError(f"label {label} is the blank, which no text holds")
        chosen = torch.tensor([label], device=self.frames.device)
        reached = self._log_reach(chosen)[:, 0]
        ends = _accumulate(reached, self.frames[:, label])
        blanks = _accumulate(ends[:-1], self.frames[:, self.blank])
        self.scores.append(float(self.score(chosen)[0]))
        self.stack.append((ends, blanks))
        self.labels.append(label)

    def pop(self, count: int = 1) -> None:
        """Remove the last labels. Raises ValueError for more than there are."""
        if count > len(self.labels):
            raise ValueError(f"{count} labels cannot be removed: there are {len(self.labels)}")
        for stack in (self.stack, self.labels, self.scores):
            del stack[len(stack) - count :]

    def _log_reach(self, labels: Tensor) -> Tensor:  # (n,) -> (T, n)
        """log-probability that h ends before frame t, so that c may begin there."""
        ends, blanks = (state[:-1] for state in self.stack[-1])
        either = torch.logaddexp(ends, blanks)[:, None].expand(-1, len(labels)).clone()
        if self.labels:  # a repeated label needs a blank in between
            either[:, labels == self.labels[-1]] = blanks[:, None]
        return either


def _accumulate(entering: Tensor, staying: Tensor) -> Tensor:  # (T,) x2 -> (T + 1,)
    """x_t = logaddexp(x_{t-1}, entering_t) + staying_t from x_0 = -inf, as one running sum."""
    upto = staying.cumsum(0)
    before = upto - staying
    inner = torch.logcumsumexp(entering - before, 0) + upto
    return torch.cat((inner.new_full((1,), -torch.inf), inner))


@dataclass(frozen=True, eq=False)
class JointScorer:
    """Joint scores of a CTC head and a decoder (Watanabe et al. 2017), per row.

    The score of a token v after a text h is weight log psi(h v) + (1 - weight) log p(v | h). psi is
    the probability that the audio begins with the labels of h v; for the end token, that it
    contains h and no more. Only the `max_candidates` most likely tokens of the decoder and the end
    are compared. A token without labels has CTC probability 0 and needs a weight of 0. Ties go to
    the decoder's order.
    """

    scorers: Sequence[PrefixScorer | None]  # None = no audio: only the decoder is used
    spell: Callable[[int], Sequence[int]]  # labels of a token; may be empty
    end: int
    weight: float
    max_candidates: int

    def best(self, row: int, log_probs: Tensor) -> int:  # (V,) of the decoder
        """The best token after the pushed text."""
        scorer = self.scorers[row]
        if scorer is None or self.weight == 0:
            return int(log_probs.argmax())
        likely = log_probs.topk(min(self.max_candidates, len(log_probs))).indices.tolist()
        if self.end not in likely:
            likely.append(self.end)
        likely = [
            token for token in likely if log_probs[token] > -torch.inf
        ]  # drop impossible tokens
        ctc = [self.prefix_score(row, token) - scorer.total for token in likely]
        decoder = log_probs[likely].double()
        scores = self.weight * torch.tensor(ctc, dtype=torch.float64, device=decoder.device)
        return int(likely[int((scores + (1 - self.weight) * decoder).argmax())])

    def prefix_score(self, row: int, token: int) -> float:
        """log psi of the pushed text and this token."""
        scorer = self.scorers[row]
        assert scorer is not None
        if token == self.end:
            return scorer.end()
        labels = self.spell(token)
        if not labels:
            return float("-inf")
        for label in labels[:-1]:
            scorer.push(label)
        found = float(scorer.score(torch.tensor([labels[-1]], device=scorer.frames.device))[0])
        scorer.pop(len(labels) - 1)
        return found

    def push(self, row: int, token: int) -> int:
        """Append a token to the text; returns its number of labels."""
        scorer, labels = self.scorers[row], self.spell(token)
        if scorer is None:
            return 0
        for label in labels:
            scorer.push(label)
        return len(labels)

    def pop(self, row: int, labels: int) -> None:
        """Remove the last labels."""
        scorer = self.scorers[row]
        if scorer is not None:
            scorer.pop(labels)
