"""Drafting from stored trajectories: the actions at the most similar recorded moments (HeiSD)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.codes.actions import ActionSpace
from mmspec.codes.episodes import Episode, get_episodes
from mmspec.codes.trajectories import FILE, Retrieved, Trajectories
from mmspec.distributions.noise import KeyedNoise
from mmspec.distributions.sampling import Sampling
from mmspec.draft import Draft, Drafter, Kind
from mmspec.drafters.lengths.length import max_useful_length
from mmspec.errors import check_number
from mmspec.recipe import Kit
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.causal import CausalTarget
from mmspec.targets.tokens.context import Context, Request


@dataclass(frozen=True)
class Retrieval(Drafter):
    """A tree of the actions at the nearest stored moments (Zheng et al. 2026).

    The nearest moments are those with the highest cosine similarity of features to the policy's
    prompt. Each group of a neighbour's action (position, rotation) may be followed by that of any
    other; a gripper is the one that came with the position; common prefixes are merged. The nearest
    moment's action is the first path. Later actions of an output are those that followed the
    nearest moment. With `whole` the first path continues to the end of the output, beyond what
    verification can accept, for a gate.

    Reconstructed: the number of neighbours, and that features are the policy's own.
    """

    space: ActionSpace
    store: Trajectories
    neighbours: int = 4
    whole: bool = False
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET,)
    uses_trees: ClassVar[bool] = True
    required_features: ClassVar[frozenset[str]] = frozenset({"hidden"})

    def __post_init__(self) -> None:
        check_number("neighbours", self.neighbours, 1, 1024, whole=True, example=4)
        if self.store.actions.shape[1] != self.space.size:
            raise ValueError(
                f"stored actions have {self.store.actions.shape[1]} components, those of this "
                f"policy {self.space.size}; record the trajectories with this policy"
            )

    def begin(self, context: Context) -> Sequence[RetrievedMoments]:
        similarity, moments = self.store.nearest(features(context), self.neighbours)
        count = -(-context.request.max_new_tokens // self.space.size)
        found = []
        for row, episode in enumerate(get_episodes(context)):
            ids = [
                self.space.encode(self.store.actions_from(int(one), count)) for one in moments[row]
            ]
            distance = self._distance(episode, int(moments[row, 0]))
            rows = [one.flatten().tolist() for one in ids]
            found.append(RetrievedMoments(rows, float(similarity[row, 0]), distance))
        return found

    def propose(self, context: Context, state: Sequence[RetrievedMoments]) -> Draft:
        return self.draft_rows(context, state, [not done for done in context.finished])

    def draft_rows(
        self, context: Context, state: Sequence[RetrievedMoments], rows: Sequence[bool]
    ) -> Draft:
        """The draft of some rows; the others have no nodes."""
        trees, longest = [], max_useful_length(context)
        for row, found in enumerate(state):
            start, left = (
                context.num_generated(row),
                context.request.max_new_tokens - context.num_generated(row),
            )
            used = min(longest, left)
            end = start + (left if self.whole else used)
            trees.append(
                _merge_paths(self._combine_paths(found, start, end, used) if rows[row] else [])
            )
        width = max(len(tokens) for tokens, _ in trees)
        if not width:
            return context.empty_draft()
        last = [text[-1] for text in context.history]
        token_rows = [
            [*tokens, *[end] * (width - len(tokens))]
            for (tokens, _), end in zip(trees, last, strict=True)
        ]
        parents = [[*parent_row, *[-1] * (width - len(parent_row))] for _, parent_row in trees]
        device = context.device
        sizes = torch.tensor([[len(tokens)] for tokens, _ in trees], device=device)
        extras = Retrieved(
            sizes[:, 0] > 0,
            torch.tensor([one.similarity for one in state], device=device),
            torch.tensor([one.distance for one in state], device=device),
            torch.tensor([_first_path(parent_row) for _, parent_row in trees], device=device),
        )
        mask = torch.arange(width, device=device) < sizes
        parent_tensor = torch.tensor(parents, device=device)
        return Draft(
            torch.tensor(token_rows, device=device), parent_tensor, mask, Kind.DET, extras=extras
        )

    def _combine_paths(
        self, found: RetrievedMoments, start: int, end: int, used: int
    ) -> list[Sequence[int]]:
        """Paths from the next component on: the nearest action first, then all combinations."""
        nearest = found.continuations[0]
        paths: list[Sequence[int]] = [nearest[start:end]]
        size, first = self.space.size, start % self.space.size
        at = start - first
        groups = [[at + dim for dim in dims if dim >= first] for dims in self.space.groups.values()]
        parts = [part for part in groups if part]
        chains: list[tuple[Sequence[int], list[int]]] = [(one, []) for one in found.continuations]
        for number, part in enumerate(parts):
            is_gripper = self.space.dims[part[0] % size].group == "gripper"
            grown = []
            for source, path in chains:
                others = found.continuations if number and not is_gripper else [source]
                grown += [(source, [*path, *(other[dim] for dim in part)]) for other in others]
            chains = grown
        return paths + [path[:used] for _, path in chains]

    def _distance(self, episode: Episode, moment: int) -> float:
        """Distance between the robot's state and the stored one; 0 where either is unknown."""
        states = self.store.states
        if states is None or not episode.states:
            return 0.0
        state = episode.states[-1].float()
        if len(state) != states.shape[1]:
            raise ValueError(
                f"a state of {len(state)} numbers is compared with stored ones of "
                f"{states.shape[1]}; record the trajectories with this robot"
            )
        return float((state - states[moment]).norm())


@dataclass(frozen=True)
class RetrievedMoments:
    """The stored moments nearest to a row's prompt."""

    continuations: Sequence[Sequence[int]]  # ids of the whole output, nearest moment first
    similarity: float  # of the nearest moment
    distance: float


def _merge_paths(paths: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Tokens and parents of the tree of these paths; the first path's nodes come first."""
    tokens, parents, known = list[int](), list[int](), dict[tuple[int, int], int]()
    for path in paths:
        node = -1
        for token in path:
            if (node, token) not in known:
                known[node, token] = len(tokens)
                tokens.append(token)
                parents.append(node)
            node = known[node, token]
    return tokens, parents


def _first_path(parents: Sequence[int]) -> int:
    """Nodes of the first path: the leading run in which each is the child of the one before."""
    return next((at for at, parent_row in enumerate(parents) if parent_row != at - 1), len(parents))


def features(context: Context) -> Tensor:  # (B, H)
    """The policy's features of its prompt: the last hidden state."""
    found: Tensor = context.shared["hidden"][: context.batch, -1]
    return found.float().cpu()


def features_of(reader: Reader, inputs: Mapping[str, Any]) -> Tensor:  # (B, H)
    """The features of a request without decoding, for recording trajectories."""
    target = CausalTarget(reader, frozenset({"hidden"}), checks=False)
    rows = len(inputs["input_ids"])
    noise = KeyedNoise.from_seed(0, rows, reader.device)
    with torch.no_grad():
        return features(target.prefill(Request(inputs, Sampling(), noise, 1)))


def store_of(kit: Kit) -> Trajectories:
    """The option `store`, or the store saved with the drafter. Raises ValueError."""
    given = kit.options["store"]
    if isinstance(given, Trajectories):
        return given
    if isinstance(given, str | Path):
        return Trajectories.load(given)
    if given is not None:
        raise ValueError(f"store={given!r} is neither Trajectories nor a folder; give one of them")
    parents = None if kit.drafter is None else kit.drafter.head.config._name_or_path
    if not parents or not (Path(parents) / FILE).is_file():
        raise ValueError(
            f"no stored trajectories; give store=, a folder with {FILE} or Trajectories"
        )
    return Trajectories.load(parents)


def retrieval(kit: Kit) -> Drafter:
    """Stored trajectories."""
    return Retrieval(kit.space, store_of(kit), kit.options["neighbours"])
