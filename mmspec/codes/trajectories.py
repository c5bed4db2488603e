"""Stored robot trajectories and nearest-neighbour retrieval (HeiSD)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mmspec.errors import check_is_file

FILE = "trajectories.safetensors"


@dataclass(frozen=True, eq=False)
class Trajectories:
    """M moments of several episodes, in order and concatenated by episode.

    `features` are the policy's last hidden state of its prompt, of length 1; `actions` the actions
    executed next, normalised; `states` the robot's states, if known. Raises ValueError for tensors
    of inconsistent shapes, and numbers that are not finite.
    """

    features: Tensor = field(repr=False)  # (M, H) float32
    actions: Tensor = field(repr=False)  # (M, D) float32
    episodes: Tensor = field(repr=False)  # (M,) int64, ascending
    states: Tensor | None = field(default=None, repr=False)  # (M, S) float32

    def __post_init__(self) -> None:
        for name in ("features", "actions", "states"):
            one = getattr(self, name)
            if one is None:
                continue
            if one.dim() != 2 or len(one) != len(self.episodes) or not len(one):
                raise ValueError(
                    f"{name} of shape {tuple(one.shape)} with episodes of "
                    f"{tuple(self.episodes.shape)}; give one row per moment, and at least one"
                )
            if not bool(one.isfinite().all()):
                raise ValueError(f"{name} hold NaN or infinite numbers; record them again")
        if self.episodes.dim() != 1 or bool((self.episodes.diff() < 0).any()):
            raise ValueError("episodes= must not fall; put the moments of each episode together")

    @classmethod
    def from_episodes(
        cls, episodes: Iterable[tuple[Tensor, Tensor, Tensor | None]]
    ) -> Trajectories:
        """From (features (T, H), normalised actions (T, D), states (T, S) or None) per episode."""
        rows = list(episodes)
        states = [one for _, _, one in rows if one is not None]
        if states and len(states) != len(rows):
            raise ValueError("states of some episodes only; give those of all, or of none")
        numbers = [torch.full((len(row[0]),), at) for at, row in enumerate(rows)]
        features = torch.cat([row[0] for row in rows]).float()
        return cls(
            torch.nn.functional.normalize(features, dim=-1),
            torch.cat([row[1] for row in rows]).float(),
            torch.cat(numbers),
            torch.cat(states).float() if states else None,
        )

    @classmethod
    def load(cls, folder: str | Path) -> Trajectories:
        """From a folder, or the file in it. Raises ValueError for anything else."""
        path = Path(folder)
        path = path / FILE if path.is_dir() else path
        try:
            check_is_file(path)
            with safe_open(path, framework="pt") as file:
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            states = found.get("states")
            made = cls(
                found["features"].float(),
                found["actions"].float(),
                found["episodes"].long(),
                None if states is None else states.float(),
            )
        except (OSError, SafetensorError, KeyError) as error:
            raise ValueError(
                f"{folder} holds no stored trajectories ({error}); give a folder with {FILE}, as "
                "Trajectories.save writes it"
            ) from error
        return made

    def save(self, folder: str | Path) -> Path:
        """Write the file into a folder, in float16; returns its path."""
        path = Path(folder) / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {"features": self.features.half(), "actions": self.actions.half()}
        tensors["episodes"] = self.episodes.int()
        if self.states is not None:
            tensors["states"] = self.states.float()
        save_file({name: one.contiguous() for name, one in tensors.items()}, path)
        return path

    @property
    def count(self) -> int:
        return len(self.episodes)

    def nearest(self, query: Tensor, count: int) -> tuple[Tensor, Tensor]:  # (B, H) -> (B, K) x2
        """The nearest moments by cosine and their similarities; exact search, ties by index.

        Raises ValueError for features of another width.
        """
        if query.shape[-1] != self.features.shape[1]:
            raise ValueError(
                f"features of width {query.shape[-1]} do not match stored ones of width "
                f"{self.features.shape[1]}; record the trajectories with this policy"
            )
        unit = torch.nn.functional.normalize(query.to(self.features), dim=-1)
        cosine = unit @ torch.nn.functional.normalize(self.features, dim=-1).T
        found = cosine.sort(dim=-1, descending=True, stable=True)
        return found.values[:, :count], found.indices[:, :count]

    def actions_from(self, moment: int, count: int) -> Tensor:  # -> (count, D)
        """The actions from a moment on; the last action repeats after its episode ends."""
        last = int((self.episodes == self.episodes[moment]).nonzero()[-1])
        rows = torch.arange(moment, moment + count).clamp_max(last)
        return self.actions[rows]

    @cached_property
    def nearest_matches(self) -> tuple[Tensor, Tensor]:  # (M,) similarity, (M,) distance
        """Similarity and distance of the nearest moment in another episode, for every moment.

        Similarity is the cosine of features, distance that of states, 0 if unknown. Raises
        ValueError for a single episode.
        """
        similarity, index = self.nearest_moments
        return similarity, self.distance_to(index)

    @cached_property
    def nearest_moments(self) -> tuple[Tensor, Tensor]:  # (M,) similarity, (M,) index
        """The nearest moment in another episode. Raises ValueError as `nearest_matches` does."""
        if len(self.episodes.unique()) < 2:
            raise ValueError(
                "a single stored episode has no matches in others; store several, or give "
                "theta= and delta="
            )
        unit = torch.nn.functional.normalize(self.features, dim=-1)
        same = self.episodes[:, None] == self.episodes
        similarity, index = (unit @ unit.T).masked_fill(same, -2).max(-1)
        return similarity, index

    def distance_to(self, index: Tensor) -> Tensor:  # (M,) -> (M,)
        """The distance of the state of every moment to that of another one; 0 if unknown."""
        if self.states is None:
            return torch.zeros(self.count)
        found: Tensor = (self.states - self.states[index]).norm(dim=-1)
        return found


@dataclass(frozen=True)
class Retrieved:
    """The retrieval results of a draft of stored trajectories (`Draft.extras`), per row.

    The first `length` nodes of such a row are the whole action of the nearest moment.
    """

    rows: Tensor  # (B,) bool: which drafts were retrieved
    similarity: Tensor  # (B,) cosine of the nearest moment
    distance: Tensor  # (B,) to the state of that moment; 0 if unknown
    length: Tensor  # (B,) int64
