"""Fit constants of recipes of actions to a policy's own episodes (KERV, HeiSD)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmspec.codes.action_constants import ActionConstants
from mmspec.codes.actions import ActionSpace
from mmspec.codes.episodes import Episode
from mmspec.codes.trajectories import Trajectories
from mmspec.drafters.actions.history import ActionForecast
from mmspec.drafters.actions.kalman import ConstantVelocity, RandomWalk
from mmspec.drafters.actions.retrieval import features_of
from mmspec.errors import check_number
from mmspec.training.fitting import TrainingProgress, silent

if TYPE_CHECKING:
    from mmspec.accelerated import Accelerated

FILTERS: tuple[ConstantVelocity | RandomWalk, ...] = (
    *(RandomWalk(process=one, measurement=1.0) for one in (1e3, 1e1, 1.0, 1e-1, 1e-2)),
    *(ConstantVelocity(process=one, measurement=1.0) for one in (1e2, 1e1, 1.0, 1e-1, 1e-2, 1e-3)),
)
SHARE = 0.95  # of matches above the thresholds of HeiSD whose actions are acceptable
MIN_MATCHES = 20
QUANTILES = torch.linspace(0, 1, 41, dtype=torch.float64)


@dataclass(frozen=True)
class RecordedEpisodes:
    """Episodes of a policy, and what it saw at each step."""

    episodes: list[Episode]
    images: list[list[Any]]  # (H, W, 3) uint8 each
    instructions: list[list[str]]

    @property
    def actions(self) -> list[Tensor]:  # (T, D) normalised each
        return [torch.stack(one.actions) for one in self.episodes]


def record(
    fast: Accelerated,
    world: str,
    count: int,
    batch: int = 16,
    seed: int = 0,
    steps: int | None = None,
    progress: TrainingProgress = silent,
) -> RecordedEpisodes:
    """Run `count` episodes of a policy side by side in batches, in environments by name.

    `steps` limits their length. Raises ValueError for no episodes, and for an unknown environment.
    """
    check_number("episodes", count, 1, whole=True, example=32)
    session: Any = fast.session
    found = RecordedEpisodes([], [], [])
    for start in range(0, count, batch):
        size = min(batch, count - start)
        rollouts: Any = fast.rollout([world] * size, seed=seed, episode=seed + start, steps=steps)
        found.episodes.extend(session.episodes(range(size)))
        for one in rollouts:
            found.images.append(one.images[:-1])
            found.instructions.append(one.instructions)
        progress("episodes", start + size, count, float("nan"))
    return found


def fit_motion(
    recorded: RecordedEpisodes, space: ActionSpace, beta: float = 0.3, window: int = 10
) -> tuple[ActionConstants, dict[str, float]]:
    """Constants of KERV from episodes that its verifier recorded deviations of; and figures.

    The filter is the one of `FILTERS` with the least mean error of the next action, grippers aside,
    over windows of `window` actions. `reference` is the 95th percentile of the variability K, as in
    the paper. Raises ValueError for episodes shorter than the window.
    """
    errors = {one: forecast_error(one, recorded.actions, space, window) for one in FILTERS}
    best = min(errors, key=lambda one: errors[one])
    hold = errors[FILTERS[0]]
    values = torch.tensor(
        [value for one in recorded.episodes for value in list_variability(one.deviations, beta)],
        dtype=torch.float64,
    )
    reference = float(values.quantile(0.95))
    made = ActionConstants(
        reference=reference if reference > 0 else 1.0,
        motion="random_walk" if isinstance(best, RandomWalk) else "constant_velocity",
        process=best.process,
        measurement=best.measurement,
    )
    usual = forecast_error(ConstantVelocity(), recorded.actions, space, window)
    figures = {
        "forecast error, bins": errors[best],
        "of the default filter": usual,
        "of the last action": hold,
        "median variability": float(values.quantile(0.5)),
    }
    return made, figures


def forecast_error(
    forecast: ActionForecast, episodes: Sequence[Tensor], space: ActionSpace, window: int
) -> float:
    """Mean distance in bins between the forecast of an action and the executed one.

    Components are filtered independently, so all windows are columns of one call. Grippers, which
    are held, do not count. Raises ValueError where no episode is longer than the window.
    """
    long = [one for one in episodes if len(one) > window]
    if not long:
        raise ValueError(f"no episode has more than {window} actions; record longer ones")
    moves = [at for at, dim in enumerate(space.dims) if dim.group != "gripper"]
    past = torch.cat([one[:-1].unfold(0, window, 1)[:, moves] for one in long])  # (M, D, window)
    after = torch.cat([one[window:, moves] for one in long])  # (M, D)
    ahead = forecast.ahead(past.flatten(0, 1).T, 1).view_as(after).clamp(-1, 1)
    return float((ahead - after).abs().mean() * (space.codes.bins - 1) / 2)


def list_variability(deviations: Sequence[float], beta: float) -> list[float]:
    """K of KERV after every step: an average of the deviations that decays by beta."""
    found, value = [], 0.0
    for one in deviations:
        value = (1 - beta) * value + beta * one
        found.append(value)
    return found


@torch.no_grad()
def store_moments(fast: Accelerated, recorded: RecordedEpisodes, batch: int = 32) -> Trajectories:
    """The recorded episodes with the policy's features of every prompt, for retrieval."""
    session: Any = fast.session
    rows = []
    for at, episode in enumerate(recorded.episodes):
        images, words = recorded.images[at], recorded.instructions[at]
        features = []
        for start in range(0, len(images), batch):
            part = slice(start, start + batch)
            request = session.prepare_request((images[part], words[part]), {})
            features.append(features_of(session.bound.backbone, request.inputs))
        states = torch.stack(episode.states) if episode.states else None
        rows.append((torch.cat(features), recorded.actions[at], states))
    return Trajectories.from_episodes(rows)


def fit_matches(
    store: Trajectories, space: ActionSpace, bias: float = 15.0, share: float = SHARE
) -> tuple[ActionConstants, dict[str, float]]:
    """Thresholds of HeiSD's unverified actions from stored episodes; and figures.

    Every moment is matched with the nearest of another episode. A match is acceptable if no
    component is more than `bias` bins off and grippers are equal. Of all pairs of quantiles as
    `theta` and `delta` the one that passes most matches is taken, where at least `share` of those
    that pass are acceptable, and at least 20; without such a pair theta is 2: never skip.

    Reconstructed: the paper stores the least similarity and the distance that were acceptable.
    """
    similarity, index = store.nearest_moments
    distance = store.distance_to(index)
    off = (space.encode(store.actions) - space.encode(store.actions[index])).abs().double()
    limit = torch.tensor([0.0 if one.group == "gripper" else bias for one in space.dims])
    good = (off <= limit).all(-1)
    thetas, deltas = similarity.double().quantile(QUANTILES), distance.double().quantile(QUANTILES)
    passes = (similarity.double() >= thetas[:, None, None]) & (
        distance.double() <= deltas[None, :, None]
    )  # (Q, Q, M)
    count, right = passes.sum(-1), (passes & good).sum(-1)
    fits = (count >= MIN_MATCHES) & (right >= share * count)
    best = int(torch.where(fits, count, -1).argmax())
    row, column = divmod(best, len(QUANTILES))
    is_found = bool(fits[row, column])
    made = ActionConstants(theta=2.0, delta=0.0)
    if is_found:
        made = ActionConstants(theta=float(thetas[row]), delta=float(deltas[column]))
    figures = {
        "matches": float(len(good)),
        "acceptable matches": float(good.double().mean()),
        "matches that pass": float(count[row, column] / len(good)) if is_found else 0.0,
    }
    return made, figures


def merge(motion: ActionConstants, matches: ActionConstants) -> ActionConstants:
    """The constants of KERV of one, those of HeiSD of the other."""
    return replace(motion, theta=matches.theta, delta=matches.delta)
