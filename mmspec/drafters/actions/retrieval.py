"""What robots did before that stood where this one stands (HeiSD)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.codes.actions import ActionSpace
from mmspec.codes.episodes import Episode, episodes_of
from mmspec.codes.trajectories import FILE, Retrieved, Trajectories
from mmspec.distributions.noise import KeyedNoise
from mmspec.distributions.sampling import Sampling
from mmspec.draft import Draft, Drafter, Kind
from mmspec.drafters.lengths.length import useful
from mmspec.errors import check_number
from mmspec.recipe import Kit
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.causal import CausalTarget
from mmspec.targets.tokens.context import Context, Request


@dataclass(frozen=True)
class Retrieval(Drafter):
    """A tree of what was done at the nearest stored moments (Zheng et al. 2026).

    The moments are those whose features are nearest by cosine to what the policy makes of its
    prompt. Each group of a `neighbours`' action (position, rotation) may be followed by that of any
    other, a gripper is the one that came with the position; shared beginnings are merged. The
    nearest moment's own action is the first path. Actions behind the first one of an answer are
    those that followed the nearest moment. With `whole` the first path goes on to the end of the
    answer, past what verification would use, for a gate to keep.

    Reconstructed: how many neighbours, and that features are the policy's own.
    """

    space: ActionSpace
    store: Trajectories
    neighbours: int = 4
    whole: bool = False
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET,)
    trees: ClassVar[bool] = True
    wants: ClassVar[frozenset[str]] = frozenset({"hidden"})

    def __post_init__(self) -> None:
        check_number("neighbours", self.neighbours, 1, whole=True, example=4)
        if self.store.actions.shape[1] != self.space.size:
            raise ValueError(
                f"stored actions have {self.store.actions.shape[1]} components, those of this "
                f"policy {self.space.size}; record the trajectories with this policy"
            )

    def begin(self, context: Context) -> Sequence[FoundMoments]:
        similarity, moments = self.store.nearest(features(context), self.neighbours)
        count = -(-context.request.room // self.space.size)
        found = []
        for row, episode in enumerate(episodes_of(context)):
            ids = [self.space.tokens(self.store.ahead(int(one), count)) for one in moments[row]]
            distance = self._distance(episode, int(moments[row, 0]))
            rows = [one.flatten().tolist() for one in ids]
            found.append(FoundMoments(rows, float(similarity[row, 0]), distance))
        return found

    def propose(self, context: Context, state: Sequence[FoundMoments]) -> Draft:
        return self.drafted(context, state, [not done for done in context.finished])

    def drafted(
        self, context: Context, state: Sequence[FoundMoments], rows: Sequence[bool]
    ) -> Draft:
        """The draft of some rows; the others have no nodes."""
        tries, longest = [], useful(context)
        for row, found in enumerate(state):
            said, left = context.generated(row), context.request.room - context.generated(row)
            used = min(longest, left)
            end = said + (left if self.whole else used)
            tries.append(_merged(self._lines(found, said, end, used) if rows[row] else []))
        width = max(len(tokens) for tokens, _ in tries)
        if not width:
            return context.nothing()
        last = [text[-1] for text in context.history]
        filled = [
            [*tokens, *[end] * (width - len(tokens))]
            for (tokens, _), end in zip(tries, last, strict=True)
        ]
        parents = [[*above, *[-1] * (width - len(above))] for _, above in tries]
        device = context.device
        sizes = torch.tensor([[len(tokens)] for tokens, _ in tries], device=device)
        extras = Retrieved(
            sizes[:, 0] > 0,
            torch.tensor([one.similarity for one in state], device=device),
            torch.tensor([one.distance for one in state], device=device),
            torch.tensor([_first_path(above) for _, above in tries], device=device),
        )
        mask = torch.arange(width, device=device) < sizes
        where = torch.tensor(parents, device=device)
        return Draft(torch.tensor(filled, device=device), where, mask, Kind.DET, extras=extras)

    def _lines(self, found: FoundMoments, said: int, end: int, used: int) -> list[Sequence[int]]:
        """Paths from the next component on: the nearest action itself, then all combinations."""
        nearest = found.answers[0]
        lines: list[Sequence[int]] = [nearest[said:end]]
        size, first = self.space.size, said % self.space.size
        at = said - first
        groups = [[at + dim for dim in dims if dim >= first] for dims in self.space.groups.values()]
        parts = [part for part in groups if part]
        chains: list[tuple[Sequence[int], list[int]]] = [(one, []) for one in found.answers]
        for number, part in enumerate(parts):
            is_gripper = self.space.dims[part[0] % size].group == "gripper"
            grown = []
            for source, line in chains:
                others = found.answers if number and not is_gripper else [source]
                grown += [(source, [*line, *(other[dim] for dim in part)]) for other in others]
            chains = grown
        return lines + [line[:used] for _, line in chains]

    def _distance(self, episode: Episode, moment: int) -> float:
        """From where the robot is to where it was then; 0 where that is not known."""
        states = self.store.states
        if states is None or not episode.states:
            return 0.0
        here = episode.states[-1].float()
        if len(here) != states.shape[1]:
            raise ValueError(
                f"a state of {len(here)} numbers is compared with stored ones of {states.shape[1]};"
                " record the trajectories with this robot"
            )
        return float((here - states[moment]).norm())


@dataclass(frozen=True)
class FoundMoments:
    """What was stored near a row's prompt."""

    answers: Sequence[Sequence[int]]  # ids of the whole answer, of the nearest moment first
    similarity: float  # of the nearest moment
    distance: float


def _merged(lines: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Tokens and parents of a tree of these paths; the first path's nodes come first."""
    tokens, parents, known = list[int](), list[int](), dict[tuple[int, int], int]()
    for line in lines:
        node = -1
        for token in line:
            if (node, token) not in known:
                known[node, token] = len(tokens)
                tokens.append(token)
                parents.append(node)
            node = known[node, token]
    return tokens, parents


def _first_path(parents: Sequence[int]) -> int:
    """Nodes of the first path: as long as each hangs from the one before."""
    return next((at for at, above in enumerate(parents) if above != at - 1), len(parents))


def features(context: Context) -> Tensor:  # (B, H)
    """What the policy makes of its prompt: the last hidden state."""
    found: Tensor = context.shared["hidden"][: context.batch, -1]
    return found.float().cpu()


def features_of(reader: Reader, inputs: Mapping[str, Any]) -> Tensor:  # (B, H)
    """The same of a request without a loop, for whoever stores trajectories."""
    target = CausalTarget(reader, frozenset({"hidden"}), checks=False)
    rows = len(inputs["input_ids"])
    noise = KeyedNoise.seeded(0, rows, reader.device)
    with torch.no_grad():
        return features(target.prefill(Request(inputs, Sampling(), noise, 1)))


def store_of(kit: Kit) -> Trajectories:
    """The option `store`, or what lies beside the drafter's weights. Raises ValueError for none."""
    given = kit.options["store"]
    if isinstance(given, Trajectories):
        return given
    if isinstance(given, str | Path):
        return Trajectories.load(given)
    if given is not None:
        raise ValueError(f"store={given!r} is neither Trajectories nor a folder; give one of them")
    where = None if kit.drafter is None else kit.drafter.head.config._name_or_path
    if not where or not (Path(where) / FILE).is_file():
        raise ValueError(
            f"no stored trajectories to look in; give store=, a folder with {FILE} or Trajectories"
        )
    return Trajectories.load(where)


def retrieval(kit: Kit) -> Drafter:
    """Stored trajectories."""
    return Retrieval(kit.space, store_of(kit), kit.options["neighbours"])
