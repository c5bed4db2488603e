"""Tolerance on action tokens: limits, closed forms, bounds, and excluded tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.codes.actions import ActionCodes, ActionDim, ActionSpace
from mmspec.codes.episodes import Episode
from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import KeyedNoise
from mmspec.draft import Draft, Kind, Scores, Verifier
from mmspec.drafters.actions.kinematics import KinematicMetric
from mmspec.trees import Tree
from mmspec.verifiers.action_tolerance import ActionTolerance, FixedRadius
from mmspec.verifiers.coupled import Coupled
from mmspec.verifiers.group_tolerance import GroupTolerance
from mmspec.verifiers.kinematic_radius import KinematicRadius
from mmspec.verifiers.scheduled_radius import ScheduledRadius
from mmspec.verifiers.similarity_gate import SimilarityGate

CODES = ActionCodes(60, 50)  # ids 10 .. 59
CPU = torch.device("cpu")
NOISE = KeyedNoise.from_seed(0, 1, CPU)
LOW, HIGH = [-1.0, -0.2, -3.0, 0.0, -1.0, -1.0, 0.0], [1.0, 0.3, 1.0, 0.1, 1.0, 2.0, 1.0]
SPACE = ActionSpace.from_statistics({"q01": LOW, "q99": HIGH, "mask": [True] * 6 + [False]}, CODES)
LOOSE = SPACE.with_strict([])


def context(said: Sequence[int], episodes: Sequence[Episode] = ()) -> Any:
    """The parts of a context that a tolerance uses."""
    shared = {"episodes": episodes} if episodes else {}
    return SimpleNamespace(batch=len(said), num_generated=lambda row: said[row], shared=shared)


def greedy(own: Tensor) -> Scores:  # (B, M) the target's tokens
    """A target that predicts these tokens."""
    distribution = Categorical(torch.nn.functional.one_hot(own, 64).float(), hard=True)
    return Scores(distribution, torch.arange(own.shape[1]).expand_as(own))


def verify(
    verifier: Verifier,
    draft: Draft | Tensor,
    own: Tensor | Scores,
    said: Sequence[int] | None = None,
    episodes: Sequence[Episode] = (),
) -> Any:
    """The verdict on a draft; by default after one generated token."""
    draft = Draft.chain(draft, Kind.DET) if isinstance(draft, Tensor) else draft
    scores = greedy(own) if isinstance(own, Tensor) else own
    noise = KeyedNoise.from_seed(0, draft.batch, CPU)
    bound = verifier.bind_context(context(said or [1] * draft.batch, episodes))
    return bound.verify(draft, scores, noise)


def within(radius: Any, space: ActionSpace = LOOSE, **more: Any) -> ActionTolerance:
    return ActionTolerance(space, FixedRadius.from_options(space, radius), **more)


def sample_case(
    seed: int, batch: int = 200, nodes: int = 6, spread: int = 6
) -> tuple[Tensor, Tensor]:
    """The target's tokens (B, N + 1) among actions, and drafts (B, N) near them."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.randint(10, 60, (batch, nodes + 1), generator=generator)
    off = torch.randint(-spread, spread + 1, (batch, nodes), generator=generator)
    return own, (own[:, :-1] + off).clamp(10, 59)


@pytest.mark.parametrize("space", [SPACE, LOOSE], ids=["strict gripper", "loose"])
def test_a_radius_of_nothing_is_exact(space: ActionSpace) -> None:
    own, tokens = sample_case(0, spread=1)
    scores, draft = greedy(own), Draft.chain(tokens, Kind.DET)
    exact: Any = Coupled().verify(draft, scores, KeyedNoise.from_seed(0, 200, CPU))
    for verifier in (within(0, space), within(0.9, space), GroupTolerance(space, 0)):
        assert verifier.lossless
        assert verifier.couples
        found = verify(verifier, draft, scores)
        if isinstance(verifier, ActionTolerance):
            assert torch.equal(found.length, exact.length)
            assert torch.equal(found.next, exact.next)
        kept = found.path >= 0
        assert torch.equal(tokens[kept], own[:, :-1][kept])
        assert found.excess is None
    assert not within(1, space).lossless


def test_what_is_kept_grows_with_the_radius() -> None:
    own, tokens = sample_case(1)
    for make in (within, lambda r: GroupTolerance(LOOSE, r), lambda r: GroupTolerance(LOOSE, 6, r)):
        lengths = [verify(make(r), tokens, own).length for r in range(8)]
        for less, more in itertools.pairwise(lengths):
            assert bool((less <= more).all())
        assert int(lengths[0].sum()) < int(lengths[-1].sum())


def test_the_whole_scale_keeps_everything() -> None:
    own, tokens = sample_case(2, spread=50)
    assert bool((verify(within(49), tokens, own).length == 6).all())
    assert bool((verify(within(float("inf")), tokens, own).length == 6).all())
    everything = GroupTolerance(LOOSE, float("inf"), float("inf"))
    assert bool((verify(everything, tokens, own).length == 6).all())


@pytest.mark.parametrize("offset", [1, 4, -3])
def test_a_constant_offset(offset: int) -> None:
    """Target + k: everything passes at r >= k, nothing below it."""
    own = torch.randint(20, 40, (1, 7), generator=torch.Generator().manual_seed(3))
    for radius in range(8):
        length = int(verify(within(radius), own[:, :-1] + offset, own).length)
        assert length == (6 if radius >= abs(offset) else 0)


@pytest.mark.parametrize("radius", [0, 3, 9])
def test_uniform_drafts_pass_as_often_as_the_closed_form_says(radius: int) -> None:
    """Both uniform on n bins: (2r + 1) / n - r (r + 1) / n^2, by enumeration of all pairs."""
    bins = CODES.bins
    own, token = torch.cartesian_prod(torch.arange(10, 60), torch.arange(10, 60)).T
    behind = torch.stack((own, torch.full_like(own, 10)), 1)
    passed = verify(within(radius), token[:, None], behind).length.double().mean()
    assert float(passed) == pytest.approx((2 * radius + 1) / bins - radius * (radius + 1) / bins**2)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("metric", ["bins", "physical"])
def test_every_kept_number_is_near_the_target_s(seed: int, metric: str) -> None:
    """|a - a*| <= r (q99 - q01) / (bins - 1), whatever the statistics, bins and radii."""
    generator = torch.Generator().manual_seed(seed)
    low = torch.randn(7, generator=generator).double() * 3
    high = low + torch.rand(7, generator=generator).double() * 2
    space = ActionSpace.from_statistics(
        {"q01": low.tolist(), "q99": high.tolist(), "mask": [True] * 6 + [False]}, CODES
    ).with_strict([3])
    radii = torch.rand(7, generator=generator).double() * (8 if metric == "bins" else 0.2)
    rule = ActionTolerance(space, FixedRadius.from_options(space, radii.tolist(), metric))
    bound = radii * space.bin_size if metric == "bins" else radii
    bound[3] = 0
    own, tokens = sample_case(seed, 400, 13)  # two actions
    said = [(row * 5) % 7 for row in range(400)]
    found = verify(rule, tokens, own, said)
    kept, dims = found.path >= 0, space.dims_at(said, torch.arange(13)[None])
    half = torch.tensor([(dim.high - dim.low) / 2 if dim.is_scaled else 1 for dim in space.dims])
    error = (CODES.decode(tokens) - CODES.decode(own[:, :-1])).abs() * half.double()[dims]
    assert bool((error <= bound[dims] + 1e-12)[kept].all())
    assert int((tokens != own[:, :-1])[kept].sum()) > 50  # and it does tolerate something
    stopped = found.length < 13
    first = found.length.clamp_max(12)[:, None]
    off = (tokens - own[:, :-1]).abs() * space.bin_size[dims]
    beyond = off.gather(1, first) > bound[dims].gather(1, first) - 1e-12
    assert bool(beyond[stopped].all())  # what stopped a path lay outside


def test_a_component_follows_from_its_position() -> None:
    radii = [0, 5, 0, 5, 0, 5, 0]
    own = torch.full((3, 5), 30)
    tokens = torch.tensor([[33, 30, 33, 30]] * 3)
    found = verify(within(radii), tokens, own, [1, 2, 6])
    assert found.length.tolist() == [4, 0, 0]
    chunk = verify(within(radii), torch.tensor([[30, 30, 33, 30]]), own[:1], [6])
    assert chunk.length.tolist() == [4]  # 6, then 0, 1, 2 of the next action


def test_groups_and_strict_components_have_radii_of_their_own() -> None:
    radii = FixedRadius.from_options(SPACE, {"position": 2, "rotation": 4, "gripper": 9})
    assert radii.bins == (2, 2, 2, 4, 4, 4, 0)
    assert (
        FixedRadius.from_options(LOOSE, {"position": 2, "rotation": 4, "gripper": 9}).bins[6] == 9
    )
    assert FixedRadius.from_options(SPACE, 9).bins == (9,) * 6 + (0,)
    tenth = ActionSpace((ActionDim("a", "motion", 0, 4.9),), CODES)  # bins of 0.1
    for bins in range(1, 50):  # 0.3 / 0.1 is below 3
        limit = FixedRadius.from_options(tenth, bins / 10, "physical").bins[0]
        assert bins <= limit < bins + 1e-6
    flat = ActionSpace((ActionDim("a", "motion", 1, 1),), CODES)
    assert FixedRadius.from_options(flat, 0.1, "physical").bins == (
        float("inf"),
    )  # one value, many names


@pytest.mark.parametrize("verifier", [within(9), GroupTolerance(LOOSE, 9, 99)], ids=["one", "all"])
def test_nothing_passes_by_distance_that_is_no_action(verifier: Verifier) -> None:
    """An end of sequence near the actions, or padding near it (`|-1 - 2| <= 9`)."""
    own = torch.tensor([[9, 30], [12, 30], [2, 30], [61, 30], [2, 30]])
    tokens = torch.tensor([[12], [9], [0], [59], [2]])
    found = verify(verifier, tokens, own)
    assert found.length.tolist() == [0, 0, 0, 0, 1]  # the same token always passes
    assert found.next.tolist() == [9, 12, 2, 61, 30]


def test_the_longest_path_is_kept_and_of_those_the_closest() -> None:
    """Context - {32 - 30, 31 - {33, 30}, 30}: depths tie, the sum of distances decides."""
    tree = Tree((-1, -1, -1, 0, 1, 1))
    tokens = torch.tensor([[32, 31, 30, 30, 33, 30]])
    own = torch.full((1, 7), 30)
    found = verify(within(3), Draft.from_tree(tree, tokens, Kind.DET), own)
    assert found.path.tolist() == [[1, 5]]
    assert found.length.tolist() == [2]
    strict = verify(within(0), Draft.from_tree(tree, tokens, Kind.DET), own)
    assert strict.path.tolist() == [[2, -1]]


def test_padding_is_never_kept() -> None:
    mask = torch.tensor([[True, True, False]])
    tokens = torch.tensor([[30, 30, 30]])
    for verifier in (within(9), GroupTolerance(LOOSE)):
        draft = Draft.chain(tokens, Kind.DET, mask=mask)
        assert verify(verifier, draft, torch.full((1, 4), 30)).length.tolist() == [2]


def test_a_sampling_target_is_compared_by_its_sample() -> None:
    generator = torch.Generator().manual_seed(4)
    distribution = Categorical(2 * torch.randn(50, 5, 64, generator=generator))
    scores = Scores(distribution, torch.arange(5).expand(50, -1))
    noise = KeyedNoise.from_seed(0, 50, CPU)
    sampled = distribution.sample(noise.shared_keys(scores.position))
    near = (sampled[:, :-1] + 2).clamp(10, 59)
    for radius in (0, 1, 2):
        found = verify(within(radius), near, scores)
        both = CODES.contains(near) & CODES.contains(sampled[:, :-1])
        passes = ((near - sampled[:, :-1]).abs() <= radius) & both | (near == sampled[:, :-1])
        assert torch.equal(found.length, passes.long().cumprod(-1).sum(-1))
        assert torch.equal(found.next, sampled.gather(1, found.length[:, None])[:, 0])
    assert int(found.length.sum()) > 50


def test_the_target_s_tokens_may_replace_the_drafted_ones() -> None:
    own, tokens = sample_case(5, 20)
    found = verify(within(9, keep="target"), tokens, own)
    assert torch.equal(found.replacements, own[:, :-1])
    assert verify(within(9), tokens, own).replacements is None
    with pytest.raises(ValueError, match="keep='both' is not known; choose draft or target"):
        within(9, keep="both")


def test_the_excess_counts_kept_tokens_that_are_not_the_target_s() -> None:
    own = torch.full((1, 5), 30)
    found = verify(within(2), torch.tensor([[30, 31, 28, 40]]), own)
    assert found.length.tolist() == [3]
    assert found.excess.tolist() == [2]
    first = verify(within(2), torch.tensor([[31, 30, 28, 40]]), own)
    assert first.excess.tolist() == [2]


def test_an_adaptive_radius_records_the_accepted_path_alone() -> None:
    """Context - {31, 34 - 28 - 50}: 4 and 2 bins off, then too far."""
    episode, tree = Episode(SPACE), Tree((-1, -1, 1, 2))
    draft = Draft.from_tree(tree, torch.tensor([[31, 34, 28, 50]]), Kind.DET)
    rule = ActionTolerance(SPACE, KinematicRadius(SPACE))
    found = verify(rule, draft, torch.full((1, 5), 30), [1], [episode])
    assert found.path.tolist() == [[1, 2, -1]]
    assert episode.step_deviations == pytest.approx([4, 2])  # the least spread is one bin


def test_wrong_variants_are_found_out() -> None:
    own = torch.full((1, 3), 30)

    def off_by_one(said: int) -> Any:  # the release's shift of indices
        return verify(within([0, 9, 0, 9, 9, 9, 0]), torch.tensor([[33, 30]]), own, [said])

    assert off_by_one(1).length.tolist() != off_by_one(2).length.tolist()
    ids_alone = (torch.tensor([0]) - torch.tensor([2])).abs() <= 9  # no look at what is an action
    passes = verify(within(9), torch.tensor([[0]]), torch.tensor([[2, 30]])).length
    assert bool(ids_alone)
    assert not int(passes)


WRONG: list[Any] = [0, "x", [1.0], None, []]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: within(-1), "radius=-1 must be a number"),
        (lambda: within([1, 2]), "2 radii for an action of 7 components"),
        (lambda: within({"position": 1}), "the groups of this action are position, rotation"),
        (lambda: within(torch.zeros(0)), "radius=float32 .* must be a number"),
        (lambda: SPACE.with_strict(WRONG[0]), "strict=0 is not a list of components"),
        (lambda: SPACE.with_strict(WRONG[1]), "strict='x' is not a list"),
        (lambda: SPACE.with_strict(WRONG[2]), "strict=.* give numbers from 0 to 6"),
        (lambda: SimilarityGate(0.9, WRONG[1]), "delta='x' must be a number of at least 0"),
        (lambda: SimilarityGate.from_store(WRONG[3], WRONG[1], 1.0), "theta='x' must be a number"),
        (
            lambda: SimilarityGate.from_store(WRONG[3], WRONG[4], None),
            r"theta=\[\] must be a number",
        ),
        (lambda: KinematicMetric.from_store(SPACE, WRONG[3], 0), "window=0 must be a whole number"),
        (lambda: FixedRadius.from_options(SPACE, 1, "metres"), "metric='metres' is not known"),
        (lambda: GroupTolerance(SPACE, -1), "bias=-1 must be a number"),
        (lambda: GroupTolerance(SPACE, aggregate="mean"), "aggregate='mean' is not known"),
        (lambda: KinematicRadius(SPACE, min_bins=20), "least=20 must be a number of .* at most 15"),
        (lambda: KinematicRadius(SPACE, reference=0), "reference=0; give a variability"),
        (lambda: ScheduledRadius(SPACE, horizon=0), "horizon=0 must be a whole number"),
        (lambda: KinematicRadius(SPACE).limits(context([1])), "the call has no episodes"),
        (
            lambda: within(9).verify(
                Draft.chain(torch.tensor([[30]]), Kind.DET), greedy(torch.full((1, 2), 30)), NOISE
            ),
            "call within",
        ),
    ],
)
def test_what_makes_no_sense(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
