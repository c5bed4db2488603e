"""Group tolerance: the components of an action are accepted together or not at all."""

from __future__ import annotations

import torch

from mmspec.draft import Draft, Kind
from mmspec.trees import Tree
from mmspec.verifiers.group_tolerance import GroupTolerance
from tests.verifiers.test_action_tolerance import SPACE, sample_case, verify, within


def test_a_group_is_kept_whole_or_not_at_all() -> None:
    """After x: y z | roll pitch yaw | gripper."""
    own = torch.full((1, 7), 30)
    rule = GroupTolerance(SPACE, bias=3, total=5)
    for tokens, length in [
        ([30, 30, 30, 30, 30, 30], 6),
        ([33, 32, 30, 30, 30, 30], 6),
        ([33, 33, 30, 30, 30, 30], 0),  # 6 together
        ([30, 34, 30, 30, 30, 30], 0),  # one too far: y goes with it
        ([30, 30, 30, 30, 34, 30], 2),
        ([30, 30, 32, 32, 32, 30], 2),
        ([30, 30, 33, 30, 28, 31], 5),  # a gripper is exact
    ]:
        assert verify(rule, torch.tensor([tokens]), own).length.tolist() == [length], tokens


def test_biases_that_cancel_pass_by_their_signed_sum() -> None:
    own, tokens = torch.full((1, 7), 30), torch.tensor([[33, 27, 33, 27, 30, 30]])
    assert verify(GroupTolerance(SPACE, 3, 3), tokens, own).length.tolist() == [0]
    signed = GroupTolerance(SPACE, 3, 3, "signed_sum")
    assert verify(signed, tokens, own).length.tolist() == [6]
    assert not GroupTolerance(SPACE, 3, 0, "signed_sum").lossless
    assert GroupTolerance(SPACE, 3, 0).lossless
    assert not GroupTolerance(SPACE, 1, 1).lossless
    assert GroupTolerance(SPACE, 0.9, 9).lossless
    for drifting in ([[33, 33, 30, 30, 30, 30]], [[27, 27, 30, 30, 30, 30]]):
        assert verify(signed, torch.tensor(drifting), own).length.tolist() == [0]


def test_groups_of_other_components_and_actions_are_summed_separately() -> None:
    """y z | roll pitch yaw | gripper | x y z | roll of the next action, 5 bins in every group."""
    own, tokens = torch.full((1, 11), 30), torch.tensor([[33, 32, 32, 30, 33, 30, 32, 30, 33, 32]])
    assert verify(GroupTolerance(SPACE, 3, 5), tokens, own).length.tolist() == [10]
    assert verify(GroupTolerance(SPACE, 3, 4), tokens, own).length.tolist() == [0]


def test_without_a_total_it_is_the_tolerance_of_tokens_cut_to_groups() -> None:
    own, tokens = sample_case(6, 300, spread=4)
    single = verify(within(3, SPACE), tokens, own).length
    groups = verify(GroupTolerance(SPACE, 3, float("inf")), tokens, own).length
    ends = torch.tensor([0, 0, 2, 2, 2, 5, 6])
    assert torch.equal(groups, ends[single])
    assert len(set(groups.tolist())) == 4


def test_groups_in_a_tree_go_by_their_own_path() -> None:
    """y - z - roll - pitch - yaw, and another z after y that is too far."""
    tree = Tree((-1, 0, 0, 1, 3, 4))
    own = torch.full((1, 7), 30)
    rule = GroupTolerance(SPACE, 3, 5)
    draft = Draft.from_tree(tree, torch.tensor([[32, 31, 39, 30, 30, 30]]), Kind.DET)
    assert verify(rule, draft, own).path.tolist() == [[0, 1, 3, 4, 5]]
    worse = Draft.from_tree(tree, torch.tensor([[32, 39, 31, 30, 30, 30]]), Kind.DET)
    assert verify(rule, worse, own).path.tolist() == [[0, 2, -1, -1, -1]]


def test_of_the_longest_paths_the_closest_is_accepted() -> None:
    """y z, and another z that is as far as the first, or nearer."""
    tree, own = Tree((-1, 0, 0)), torch.full((1, 4), 30)
    for tokens, path in (([30, 32, 31], [0, 2]), ([30, 31, 32], [0, 1]), ([30, 28, 32], [0, 1])):
        draft = Draft.from_tree(tree, torch.tensor([tokens]), Kind.DET)
        assert verify(GroupTolerance(SPACE, 3, 5), draft, own).path.tolist() == [path]


def test_part_of_a_group_at_the_end_of_a_draft_counts_as_one() -> None:
    own = torch.full((1, 3), 30)
    found = verify(GroupTolerance(SPACE, 3, 3), torch.tensor([[32, 31]]), own, [3])
    assert found.length.tolist() == [2]
    found = verify(GroupTolerance(SPACE, 3, 3), torch.tensor([[32, 32]]), own, [3])
    assert found.length.tolist() == [0]
