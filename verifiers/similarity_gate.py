"""Accept stored actions of similar moments without verification (HeiSD)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mmspec.codes.episodes import Episode, get_episodes
from mmspec.codes.trajectories import Retrieved, Trajectories
from mmspec.draft import Draft, Gate, Verdict
from mmspec.errors import check_number
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True)
class SimilarityGate(Gate):
    """Accept a whole stored action if its moment is similar and near (HeiSD, Zheng et al. 2026).

    This requires a cosine of the features of at least theta, a distance of the states of at most
    `delta`, and at most `max_skips` such steps in a row. theta adapts to task outcomes: a success
    lowers it by eta (theta - `min_theta`), a failure raises it by eta (1 - theta) / 2. Rows that do
    not pass wait for a round. Lossy, and the lossiest part of HeiSD: theta above 1 never skips and
    never adapts, -1 with an infinite delta is the stored policy alone.

    Reconstructed: all of the rule except that it thresholds similarity and distance and learns from
    feedback. Raises ValueError for a negative distance and eta outside [0, 1].
    """

    theta: float
    delta: float
    min_theta: float = -1.0
    eta: float = 0.1
    max_skips: int = 4

    def __post_init__(self) -> None:
        check_number("theta", self.theta, example=0.9)
        check_number("eta", self.eta, 0, 1, example=0.1)
        check_number("most_skips", self.max_skips, 1, whole=True, example=4)
        if not (isinstance(self.delta, float) and self.delta == math.inf):
            check_number("delta", self.delta, 0, example=0.5)

    @classmethod
    def from_store(
        cls,
        store: Trajectories,
        theta: float | None = None,
        delta: float | None = None,
        max_skips: int = 4,
    ) -> SimilarityGate:
        """Take missing thresholds from a store: 0.9 quantiles of matches between episodes."""
        if theta is not None and delta is not None:
            check_number("theta", theta, example=0.9)
            return cls(theta, delta, min(theta, -1.0), max_skips=max_skips)
        cls(0.0 if theta is None else theta, 0.0 if delta is None else delta, max_skips=max_skips)
        similarity, distance = store.nearest_matches
        theta = float(similarity.quantile(0.9)) if theta is None else theta
        delta = float(distance.quantile(0.9)) if delta is None else delta
        return cls(theta, delta, min(theta, float(similarity.min())), max_skips=max_skips)

    def skip(self, context: Context, draft: Draft) -> Verdict | None:
        if not isinstance(draft.extras, Retrieved):
            return None
        found = draft.extras
        rows = zip(
            get_episodes(context),
            found.rows.tolist(),
            found.similarity.tolist(),
            found.distance.tolist(),
            found.length.tolist(),
            strict=True,
        )
        lengths = [self._length(*row) for row in rows]
        if not any(lengths):
            return None
        width, device = max(lengths), draft.tokens.device
        index = torch.arange(width, device=device)
        length = torch.tensor(lengths, device=device)
        return Verdict(torch.where(index < length[:, None], index, -1), length, None)

    def threshold(self, outcomes: Sequence[bool]) -> float:
        """theta after tasks with these outcomes."""
        theta = self.theta
        for success in outcomes if theta <= 1 else ():
            theta += -self.eta * (theta - self.min_theta) if success else self.eta * (1 - theta) / 2
        return theta

    def _length(
        self, episode: Episode, is_drafted: bool, similarity: float, distance: float, length: int
    ) -> int:
        """The accepted nodes of a row; updates the skips of the episode."""
        if not is_drafted:
            return 0
        near = similarity >= self.threshold(episode.outcomes) and distance <= self.delta
        if not near or episode.skips >= self.max_skips:
            episode.skips = 0
            return 0
        episode.skips += 1
        return length
