"""Classifying a robot's motion as straight and fast or as slow and curved (the metric of HeiSD)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.codes.actions import ActionSpace
from mmspec.codes.episodes import Episode
from mmspec.codes.trajectories import Trajectories
from mmspec.errors import check_number

STEPS = 5  # of Gauss-Newton
WINDOW = 15  # positions, in the paper
FLAT = 1e-6  # share of the largest extent below which points are a line


@dataclass(frozen=True)
class KinematicMetric:
    """F = a Norm(R) + (1 - a) Norm(Disp) of the last `window` positions (Zheng et al. 2026).

    R is the radius of the circle through them, Disp the length of the path. Norm scales to the
    range between the minimum and the 95th percentile, which are measured once; a line has the
    largest R. Positions are cumulative sums of the executed deltas.

    Raises ValueError for a weight outside [0, 1] and a window below 3.
    """

    space: ActionSpace
    radius_bounds: tuple[float, float]
    path_bounds: tuple[float, float]
    window: int = WINDOW
    weight: float = 0.5  # a

    def __post_init__(self) -> None:
        check_number("window", self.window, 3, whole=True, example=WINDOW)
        check_number("weight", self.weight, 0, 1, example=0.5)

    @classmethod
    def from_store(
        cls,
        space: ActionSpace,
        store: Trajectories,
        window: int | None = None,
        weight: float = 0.5,
    ) -> KinematicMetric:
        """Measure the bounds on all windows of stored trajectories.

        The default of `window` is that of the paper, and at most a third of the median episode: a
        window as long as the episodes would hardly ever be full. Raises ValueError where no episode
        is long enough.
        """
        if window is not None:
            check_number("window", window, 3, whole=True, example=WINDOW)  # points of a circle
        episodes = [store.actions[store.episodes == number] for number in store.episodes.unique()]
        if window is None:
            lengths = sorted(map(len, episodes))
            window = max(min(WINDOW, lengths[len(lengths) // 2] // 3), 3)
        radii, paths = list[Tensor](), list[Tensor]()
        for actions in episodes:
            points = _positions(space, actions)
            if len(points) >= window:
                windows = points.unfold(0, window, 1).transpose(1, 2)  # (n, window, k)
                radii.append(circle_radius(windows))
                paths.append(path_length(windows))
        if not radii:
            raise ValueError(
                f"no stored episode has {window} steps; give a shorter window=, or store longer "
                "ones"
            )
        bounds = [_bounds(torch.cat(one)) for one in (radii, paths)]
        return cls(space, bounds[0], bounds[1], window, weight)

    def of(self, episode: Episode) -> float | None:
        """F, in [0, 1]; None while the episode is shorter than the window."""
        recent = episode.recent(self.window)
        if len(recent) < self.window:
            return None
        points = _positions(self.space, recent)
        radius = _normalise(float(circle_radius(points)), self.radius_bounds)
        length = _normalise(float(path_length(points)), self.path_bounds)
        return self.weight * radius + (1 - self.weight) * length


def circle_radius(points: Tensor) -> Tensor:  # (..., n, k) -> (...)
    """The radius of the circle fitted to points, in their principal plane.

    An algebraic fit (2 u u_c + 2 v v_c + s = u^2 + v^2), then Gauss-Newton on the distances from
    the circle; infinite for collinear points.
    """
    centred = points.double() - points.double().mean(-2, keepdim=True)
    _, extent, basis = torch.linalg.svd(centred, full_matrices=False)
    u, v = (centred @ basis[..., :2, :].transpose(-1, -2)).unbind(-1)
    line = extent[..., 1] <= FLAT * extent[..., 0].clamp_min(torch.finfo(torch.float64).tiny)
    u = torch.where(line[..., None], torch.arange(u.shape[-1]).double().cos(), u)  # any circle
    v = torch.where(line[..., None], torch.arange(v.shape[-1]).double().sin(), v)
    system = torch.stack((2 * u, 2 * v, torch.ones_like(u)), -1)
    square = (u**2 + v**2)[..., None]
    centre = torch.linalg.lstsq(system, square, driver="gelsd").solution[..., :2, 0]
    for _ in range(STEPS):
        du, dv = u - centre[..., :1], v - centre[..., 1:]
        distance = (du**2 + dv**2).sqrt().clamp_min(torch.finfo(torch.float64).tiny)
        slope = torch.stack((-du / distance, -dv / distance), -1)
        slope = slope - slope.mean(-2, keepdim=True)
        error = (distance - distance.mean(-1, keepdim=True))[..., None]
        step = torch.linalg.lstsq(slope, -error, driver="gelsd").solution[..., 0]
        centre = centre + step
    distance = ((u - centre[..., :1]) ** 2 + (v - centre[..., 1:]) ** 2).sqrt().mean(-1)
    return torch.where(line, torch.inf, distance)


def path_length(points: Tensor) -> Tensor:  # (..., n, k) -> (...)
    """The length of the path through points."""
    steps: Tensor = points.double().diff(dim=-2).norm(dim=-1)
    return steps.sum(-1)


def _positions(space: ActionSpace, actions: Tensor) -> Tensor:  # (n, D) -> (n, k)
    """Positions from normalised deltas. Raises ValueError for actions of a single component."""
    groups = space.groups
    dims = groups.get("position", groups.get("motion", ()))
    if len(dims) < 2:
        raise ValueError(
            f"the components {', '.join(dim.name for dim in space.dims)} do not span a plane for a "
            "circle in; use recipe 'retrieval'"
        )
    return space.unnormalise(actions)[:, list(dims)].cumsum(0)


def _bounds(values: Tensor) -> tuple[float, float]:
    """The minimum and the 95th percentile; infinite radii count as the largest finite one."""
    finite = values[values.isfinite()]
    if not len(finite):
        return 0.0, 1.0
    capped = values.clamp_max(float(finite.max()))
    return float(capped.min()), float(capped.quantile(0.95))


def _normalise(value: float, bounds: tuple[float, float]) -> float:
    low, high = bounds
    return 1.0 if value >= high else max(value - low, 0.0) / (high - low)
