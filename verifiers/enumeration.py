"""Enumerate the exact output distribution of a verifier, to test losslessness.

Every draft the drafter could propose, every accept / reject decision and every correction is run
through the verifier's own `verify`, with scripted noise instead of a seed. Outcomes are weighted by
their probability and completed by ancestral sampling from the target to the depth of the draft plus
one, because the first token alone does not expose a wrong verifier of blocks or trees.

    enumerate_emitted(p, q, Exact())                   first token, one proposal: equals p
    enumerate_emitted(p, q, Recursive(), 3, Kind.IID)  first token, three proposals
    enumerate_joint(p, q, Traversal(), tree, Kind.WOR) all tokens up to depth D + 1: equals
                                                       ancestral_joint(p, D + 1)
    expected_accepted(p, q, Block(), Tree.chain(4))    expected number of accepted tokens

Distributions are probabilities (V,), the same after every prefix, or functions of the prefix. They
may return `Categorical`, where a hard one is greedy decoding. Use float64 and small vocabularies.
Verifiers that use shared noise (`Coupled`) make no decisions by flips and picks, so only their
greedy form can be enumerated; compare their samples with plain decoding under the same seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import Flips, Keys
from mmspec.draft import Draft, Kind, Rule, Scores, Verdict, Verifier
from mmspec.trees import Tree
from mmspec.verifiers.recursive import Recursive
from mmspec.verifiers.walk import one_hot, remove_token

Table = Tensor | Categorical | Callable[[tuple[int, ...]], Tensor | Categorical]


def enumerate_emitted(
    p: Table, q: Table, verifier: Verifier | Rule, siblings: int = 1, kind: Kind = Kind.WOR
) -> Tensor:  # (V,)
    """The distribution of the first token when `siblings` proposals for it are verified."""
    return enumerate_joint(p, q, verifier, siblings, kind).sum(1)


def enumerate_joint(
    p: Table, q: Table, verifier: Verifier | Rule, tree: Tree | int, kind: Kind = Kind.WOR
) -> Tensor:  # (V,) * (D + 1)
    """The joint distribution of the emitted tokens, completed to the depth of `tree` plus one."""
    return enumerate_rounds(p, q, verifier, tree, kind).joint


def expected_accepted(
    p: Table, q: Table, verifier: Verifier | Rule, tree: Tree | int = 1, kind: Kind = Kind.WOR
) -> float:
    """Expected number of accepted draft tokens: the acceptance probability, for one position."""
    lengths = enumerate_rounds(p, q, verifier, tree, kind).lengths
    return float(lengths @ torch.arange(len(lengths), dtype=lengths.dtype))


def ancestral_joint(p: Table, depth: int) -> Tensor:  # (V,) * depth
    """The target's joint distribution, which a lossless verifier must reproduce."""
    mass = torch.ones((), dtype=torch.float64)
    for table in _tables(p, depth):
        mass = mass[..., None] * table.probs.reshape(*mass.shape, -1)
    return mass


def enumerate_drafts(q: Table, tree: Tree, kind: Kind) -> tuple[Tensor, Tensor]:
    """All drafts of a tree and their probabilities: tokens (R, N), weights (R,)."""
    return _drafts(_tables(q, max(tree.depth, 1)), tree, kind)[:2]


@dataclass(frozen=True)
class Enumeration:
    """All outcomes of one round."""

    joint: Tensor  # (V,) * (D + 1) distribution of the emitted tokens, completed by the target
    lengths: Tensor  # (D + 1,) distribution of the number of accepted draft tokens


def enumerate_rounds(
    p: Table, q: Table, verifier: Verifier | Rule, tree: Tree | int, kind: Kind
) -> Enumeration:
    """Run every draft and decision through `verifier.verify`; rules walk with `Recursive`."""
    if isinstance(tree, int):
        tree = Tree.branching([tree])
    tokens, weight, distributions = _drafts(_tables(q, max(tree.depth, 1)), tree, kind)
    draft = Draft.from_tree(tree, tokens, kind, None if kind is Kind.DET else distributions)
    return enumerate_verdicts(p, draft, weight, verifier)


def enumerate_verdicts(
    p: Table, draft: Draft, weight: Tensor, verifier: Verifier | Rule, depth: int | None = None
) -> Enumeration:
    """Run every decision about given drafts, one a row, of which row r has probability weight[r].

    `depth` is the number of levels of the deepest; default: of its tree.
    """
    walk = verifier if isinstance(verifier, Verifier) else Recursive(verifier)
    if depth is None:
        assert draft.tree is not None
        depth = draft.tree.depth
    target, levels = _tables(p, depth + 1), draft.depths() + 1
    size = target[0].size
    codes = torch.zeros(draft.batch, 1 + draft.nodes, dtype=torch.int64)  # of prefixes, in base V
    for node, token in enumerate(draft.tokens.unbind(1)):
        before = codes.gather(1, draft.parents[:, node : node + 1] + 1)[:, 0]
        codes[:, node + 1] = before * size + token
    starts = torch.tensor([0, *(len(one.scores) for one in target)]).cumsum(0)  # of each level
    rows = starts[torch.cat((torch.zeros_like(codes[:, :1]), levels), 1)] + codes
    position = torch.cat((torch.zeros_like(codes[:, :1]), levels), 1)
    scores = Scores(Categorical.cat(target, 0)[rows], position)
    masses = [torch.zeros(size**length, dtype=torch.float64) for length in range(depth + 2)]
    lengths = torch.zeros(depth + 1, dtype=torch.float64)
    for origin, chance, verdict in _outcomes(walk, draft, scores):
        share = weight[origin] * chance
        lengths.index_add_(0, verdict.length, share)
        _emit(masses, draft.tokens[origin], verdict, share, size)
    for length in range(1, depth + 1):  # completed by the target
        masses[length + 1] += (masses[length][:, None] * target[length].probs).flatten()
    return Enumeration(masses[-1].reshape((size,) * (depth + 1)), lengths)


@dataclass
class ScriptedNoise:
    """Noise that follows `script`; open decisions take one branch and record the others."""

    script: Tensor  # (R, S) int64 decision of each row at each slot, -1 = open
    chance: Tensor  # (R,) probability of the script, and of the decisions made
    slots: dict[tuple[int, int], int]  # (lane, element) -> column of `script`

    def __post_init__(self) -> None:
        self.branches: list[tuple[Tensor, Tensor, Tensor]] = []  # rows, scripts, chances
        self._seen: set[int] = set()

    def shared_keys(self, position: Tensor) -> Keys:
        raise ValueError("noise shared by positions cannot be enumerated; compare seeded samples")

    def fresh_keys(self, lane: int, index: Tensor) -> Keys:
        raise ValueError("raw keys cannot be enumerated; verifiers decide with flip and pick")

    def position_gumbel(self, lengths: tuple[int, ...], count: int, size: int) -> Tensor:
        raise ValueError("noise shared by positions cannot be enumerated; compare seeded samples")

    def fresh_gumbel(self, lane: int, count: int, size: int) -> Tensor:
        raise ValueError("raw noise cannot be enumerated; verifiers decide with flip and pick")

    def fresh_uniform(self, lane: int, count: int, size: int) -> Tensor:
        raise ValueError("raw noise cannot be enumerated; verifiers decide with flip and pick")

    def flip(self, probability: Tensor, lane: int) -> Tensor:
        self._claim_lane(lane)
        chances = probability.double().reshape(len(probability), -1)
        taken = [
            self._decide(torch.stack([1 - chance, chance], 1), (lane, element))
            for element, chance in enumerate(chances.unbind(1))
        ]
        return torch.stack(taken, 1).reshape(probability.shape) > 0

    def prepare_flips(self, lanes: Tensor) -> Flips:
        return lambda place, probability: self.flip(probability, int(lanes[place]))

    def pick(self, weights: Tensor, lane: int) -> Tensor:
        self._claim_lane(lane)
        weights = weights.double()
        return self._decide(weights / weights.sum(-1, keepdim=True), (lane, 0))

    def choose(self, survival: Tensor, level: Tensor, count: int, lane: int) -> Tensor:
        own = level[..., 0].expand(survival.shape[:2])
        slot = torch.zeros_like(own)
        for depth in range(count):  # its number falls between two of all bounds of the level
            self._claim_lane(lane + depth)
            here = own == depth
            bounds = torch.where(here[..., None], survival, 0).double().flatten(1)
            bounds = bounds.sort(-1, descending=True).values
            bounds = torch.nn.functional.pad(bounds, (0, 1))
            tops = torch.nn.functional.pad(bounds[:, :-1], (1, 0), value=1.0)
            chosen = self._decide((tops - bounds).clamp_min(0), (lane + depth, 0))[:, None]
            number = (tops.gather(1, chosen) + bounds.gather(1, chosen)) / 2
            slot = torch.where(here, (survival > number[..., None]).sum(-1), slot)
        return slot

    def _claim_lane(self, lane: int) -> None:
        if lane in self._seen:
            raise ValueError(
                f"lane {lane} is used twice in one verdict, so its draws are not independent"
            )
        self._seen.add(lane)

    def _decide(self, weights: Tensor, slot: tuple[int, int]) -> Tensor:  # (R, K) -> (R,)
        column = self.slots.setdefault(slot, len(self.slots))
        if column >= self.script.shape[1]:
            blank = self.script.new_full((len(self.script), column + 1 - self.script.shape[1]), -1)
            self.script = torch.cat([self.script, blank], 1)
        possible = weights > 0
        scripted = self.script[:, column]
        choice = torch.where(scripted >= 0, scripted, possible.int().argmax(-1))
        others = possible & (scripted < 0)[:, None]
        others &= torch.arange(weights.shape[1]) != choice[:, None]
        rows, ways = others.nonzero(as_tuple=True)
        if len(rows):
            scripts = self.script[rows]
            scripts[:, column] = ways
            self.branches.append((rows, scripts, self.chance[rows] * weights[rows, ways]))
        self.script = self.script.clone()
        self.script[:, column] = choice
        gained = weights.gather(1, choice[:, None]).squeeze(1)
        self.chance = torch.where(scripted >= 0, self.chance, self.chance * gained)
        return choice


def _outcomes(
    verifier: Verifier, draft: Draft, scores: Scores
) -> list[tuple[Tensor, Tensor, Verdict]]:
    """All outcomes in batches: (row of `draft`, probability given that draft, verdict)."""
    outcomes, slots = [], dict[tuple[int, int], int]()
    origin = torch.arange(draft.batch)
    script = torch.empty(draft.batch, 0, dtype=torch.int64)
    chance = torch.ones(draft.batch, dtype=torch.float64)
    while True:
        noise = ScriptedNoise(script, chance, slots)
        some = replace(
            draft,
            tokens=draft.tokens[origin],
            parents=draft.parents[origin],
            mask=draft.mask[origin],
            distribution=None if draft.distribution is None else draft.distribution[origin],
        )
        verdict = verifier.verify(
            some, Scores(scores.distribution[origin], scores.position[origin]), noise
        )
        outcomes.append((origin, noise.chance, verdict))
        wide = [
            torch.nn.functional.pad(script, (0, len(slots) - script.shape[1]), value=-1)
            for _, script, _ in noise.branches
        ]
        if not wide:
            break
        origin = origin[torch.cat([rows for rows, _, _ in noise.branches])]
        script, chance = torch.cat(wide), torch.cat([share for _, _, share in noise.branches])
    return outcomes


def _drafts(
    tables: list[Categorical], tree: Tree, kind: Kind
) -> tuple[Tensor, Tensor, Categorical]:
    """All drafts of `tree`: tokens (R, N), weights (R,), distributions (R, N)."""
    size = tables[0].size
    tokens = torch.zeros(1, 0, dtype=torch.int64)
    weight = torch.ones(1, dtype=torch.float64)
    for node, parent in enumerate(tree.parents):
        before = _codes(tokens, tree, size)[:, parent + 1]
        q = _pick(tables, tree.depths[node], before)
        earlier = [kid for kid in tree.children[parent + 1] if kid < node]
        last = tree.children[parent + 1][-1] == node
        chances = _conditional(q, tokens[:, earlier], kind, last)
        rows, drawn = chances.nonzero(as_tuple=True)
        weight = weight[rows] * chances[rows, drawn]
        tokens = torch.cat([tokens[rows], drawn[:, None]], 1)
    codes = _codes(tokens, tree, size)
    distributions = [
        _pick(tables, d, codes[:, up + 1]) for d, up in zip(tree.depths, tree.parents, strict=True)
    ]
    stacked = (
        Categorical.stack(distributions) if distributions else Categorical(torch.zeros(1, 0, size))
    )
    return tokens, weight, stacked


def _conditional(q: Categorical, earlier: Tensor, kind: Kind, last: bool) -> Tensor:  # (R, V)
    """The distribution of the next sibling given the earlier ones (R, J), as drafters sample it."""
    if kind is Kind.RACE:
        raise ValueError("RACE proposals share the target's noise and cannot be enumerated")
    drawn = q.probs.double()
    if q.hard or kind is Kind.DET or (kind is Kind.HUB and not last):
        order = q.scores.sort(dim=-1, descending=True, stable=True).indices
        return one_hot(order[:, earlier.shape[1]], drawn)
    if kind is Kind.IID:
        return drawn
    spare = torch.ones_like(drawn)
    for x in earlier.unbind(1):
        drawn, spare = remove_token(drawn, x), spare.scatter(-1, x[:, None], 0)
    lowest = one_hot(spare.argmax(-1), drawn)  # no mass left: fill up with an impossible token
    return torch.where((drawn.sum(-1, keepdim=True) > 0), drawn, lowest)


def _codes(tokens: Tensor, tree: Tree, size: int) -> Tensor:  # (R, 1 + nodes so far)
    """Number of the prefix that ends at the context and at each node, in base V."""
    codes = [torch.zeros(len(tokens), dtype=torch.int64)]
    for node, x in enumerate(tokens.unbind(1)):
        codes.append(codes[tree.parents[node] + 1] * size + x)
    return torch.stack(codes, 1)


def _pick(tables: list[Categorical], depth: int, codes: Tensor) -> Categorical:  # (R, V)
    return tables[depth][codes]


def _tables(table: Table, depth: int) -> list[Categorical]:
    """The distributions after all prefixes of 0 .. depth - 1 tokens, as (V ** length, V)."""

    def at(prefix: tuple[int, ...]) -> Categorical:
        found = table if isinstance(table, Tensor | Categorical) else table(prefix)
        found = found if isinstance(found, Categorical) else Categorical.from_weights(found)
        return Categorical(found.scores.double(), found.hard)

    size = at(()).size
    return [
        Categorical.stack([at(prefix) for prefix in product(range(size), repeat=length)], 0)
        for length in range(depth)
    ]


def _emit(masses: list[Tensor], tokens: Tensor, verdict: Verdict, share: Tensor, size: int) -> None:
    """Add the emitted tokens of every outcome to the mass of sequences of that length."""
    assert verdict.next is not None
    code = torch.zeros_like(verdict.length)
    for depth in range(verdict.path.shape[1]):
        node = verdict.path[:, depth]
        x = tokens.gather(1, node.clamp_min(0)[:, None]).squeeze(1)
        code = torch.where(depth < verdict.length, code * size + x, code)
    code = code * size + verdict.next
    for length in range(1, len(masses)):
        here = verdict.length + 1 == length
        masses[length].index_add_(0, code[here], share[here])
