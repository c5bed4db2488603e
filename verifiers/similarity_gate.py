"""What was done where a robot stands is done again, unread, if it stands close enough (HeiSD)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mmspec.codes.episodes import Episode, episodes_of
from mmspec.codes.trajectories import Retrieved, Trajectories
from mmspec.draft import Draft, Gate, Verdict
from mmspec.errors import check_number
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True)
class SimilarityGate(Gate):
    """Keep a stored action whole if its moment is alike and near (HeiSD, Zheng et al. 2026).

    That is where the cosine of the features is at least theta and the distance of the states at
    most `delta`, after at most `most` such steps in a row. theta learns from how tasks end: a
    success brings it down by eta (theta - `least`), a failure up by eta (1 - theta) / 2. Rows that
    are not sure wait for a round. Lossy, and the lossiest part of HeiSD: theta above 1 never skips
    and never learns, -1 with an infinite delta is the stored policy alone.

    Reconstructed: all of the rule but that it thresholds similarity and distance and learns from
    feedback. Raises ValueError for a negative distance and eta outside [0, 1].
    """

    theta: float
    delta: float
    least: float = -1.0
    eta: float = 0.1
    most: int = 4

    def __post_init__(self) -> None:
        check_number("theta", self.theta, example=0.9)
        check_number("eta", self.eta, 0, 1, example=0.1)
        check_number("most_skips", self.most, 1, whole=True, example=4)
        if not self.delta >= 0:
            raise ValueError(f"delta={self.delta} is no distance; give 0 or more")

    @classmethod
    def measured(
        cls,
        store: Trajectories,
        theta: float | None = None,
        delta: float | None = None,
        most: int = 4,
    ) -> SimilarityGate:
        """With thresholds of a store: the 0.9 quantiles of how episodes match each other."""
        if theta is not None and delta is not None:
            return cls(theta, delta, min(theta, -1.0), most=most)
        similarity, distance = store.matches
        theta = float(similarity.quantile(0.9)) if theta is None else theta
        delta = float(distance.quantile(0.9)) if delta is None else delta
        return cls(theta, delta, min(theta, float(similarity.min())), most=most)

    def skip(self, context: Context, draft: Draft) -> Verdict | None:
        if not isinstance(draft.extras, Retrieved):
            return None
        found = draft.extras
        alike = zip(
            episodes_of(context),
            found.rows.tolist(),
            found.similarity.tolist(),
            found.distance.tolist(),
            found.length.tolist(),
            strict=True,
        )
        lengths = [self._length(*row) for row in alike]
        if not any(lengths):
            return None
        width, device = max(lengths), draft.tokens.device
        index = torch.arange(width, device=device)
        length = torch.tensor(lengths, device=device)
        return Verdict(torch.where(index < length[:, None], index, -1), length, None)

    def threshold(self, outcomes: Sequence[bool]) -> float:
        """theta behind tasks that ended so."""
        theta = self.theta
        for success in outcomes if theta <= 1 else ():
            theta += -self.eta * (theta - self.least) if success else self.eta * (1 - theta) / 2
        return theta

    def _length(
        self, episode: Episode, is_drafted: bool, alike: float, far: float, length: int
    ) -> int:
        """Nodes of a row that are kept unread; notes it with the episode."""
        if not is_drafted:
            return 0
        near = alike >= self.threshold(episode.outcomes) and far <= self.delta
        if not near or episode.skips >= self.most:
            episode.skips = 0
            return 0
        episode.skips += 1
        return length
