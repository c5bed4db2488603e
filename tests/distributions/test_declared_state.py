"""Processors that declare their state, and the prefixes that they follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec.distributions.call_state import StateTree, StepwiseProcessor
from mmspec.modalities.common.tiny_models import tiny_llama
from mmspec.trees import NodePrefix, Tree, paths_of_tree, paths_of_visible
from tests.covering import limited


class NoTwice(mmspec.StatefulProcessor):
    """Bars the tokens of the last `window` places, which it keeps as its state."""

    def __init__(self, window: int) -> None:
        self.window = window

    def begin(self, row: int, prompt: Sequence[int]) -> Any:
        return tuple(prompt[-self.window :])

    def advance(self, state: Any, token: int) -> Any:
        return None if token in state else (*state[1:], token)

    def apply(self, states: Sequence[Any], scores: Tensor) -> Tensor:
        made = scores.clone()
        for row, state in enumerate(states):
            if state is not None:
                made[row, list(state)] = -torch.inf
        return made


REQUEST: dict[str, Any] = {
    "input_ids": torch.tensor([[5, 1, 2, 3], [0, 4, 4, 6]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]]),
    "max_new_tokens": 24,
}


@pytest.mark.parametrize("recipe", limited(["coupled", "dynamic-tree", "prompt-lookup"], 2))
def test_a_declared_state_follows_every_path(recipe: str) -> None:
    model = tiny_llama(12, seed=3)
    drafter = {"drafter": tiny_llama(12, 1, seed=4)} if recipe != "prompt-lookup" else {}
    fast = mmspec.accelerate(model, recipe, **drafter)
    own = [NoTwice(3)]
    steps = [StepwiseProcessor(own[0])]
    greedy = model.generate(**REQUEST, do_sample=False, logits_processor=steps)
    assert torch.equal(
        fast.generate(**REQUEST, do_sample=False, logits_processor=own).sequences, greedy
    )
    hook = model.generate(**REQUEST, do_sample=False, logits_processor=own, custom_generate=fast)
    assert torch.equal(hook, greedy)
    how: dict[str, Any] = {"do_sample": True, "top_k": 0, "seed": 2, "logits_processor": own}
    plain = mmspec.accelerate(model, "plain").generate(**REQUEST, **how)
    assert torch.equal(fast.generate(**REQUEST, **how).sequences, plain.sequences)
    for row in greedy.tolist():
        new = row[1:]
        assert all(token not in new[i - 3 : i] for i, token in enumerate(new) if i >= 3)


def test_plain_generate_refuses_it_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"StepwiseProcessor\(processor\)"):
        tiny_llama(12).generate(**REQUEST, logits_processor=[NoTwice(2)])


def test_prefix_functions_see_true_prefixes_only() -> None:
    """`prefix_allowed_tokens_fn` goes the same way: one read of the device per draft."""
    model = tiny_llama(12, seed=3)

    def allow(row: int, ids: Tensor) -> list[int]:
        assert ids[: REQUEST["input_ids"].shape[1]].tolist() == REQUEST["input_ids"][row].tolist()
        return [(int(ids[-1]) * 5 + step + row) % 12 for step in (1, 2, 3)]

    given: dict[str, Any] = {"do_sample": False, "prefix_allowed_tokens_fn": allow}
    wanted = model.generate(**REQUEST, **given)
    fast = mmspec.accelerate(model, "dynamic-tree", drafter=tiny_llama(12, 1, seed=4))
    assert torch.equal(fast.generate(**REQUEST, **given).sequences, wanted)


def test_a_state_is_made_once_and_what_must_not_follow_is_refused() -> None:
    tree = StateTree(NoTwice(2), 0, [7, 8])
    state = tree.find([1], [2, 3])
    assert state == (2, 3)
    assert tree.find([1], [2, 3]) is state
    assert tree.find([1, 2], [3]) is state  # the root moved along the path
    assert tree.find([1, 2], [1]) is None
    assert tree.find([], [9]) == (8, 9)  # of another run
    with pytest.raises(ValueError, match="token 8 must not follow"):
        tree.commit([8])


def test_paths_are_those_of_the_tree() -> None:
    tokens = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]])
    tree = Tree((-1, -1, 0, 2))
    wanted = [[[], [10], [11], [10, 12], [10, 12, 13]], [[], [20], [21], [20, 22], [20, 22, 23]]]
    assert paths_of_tree(tokens, tree.parents) == wanted
    assert paths_of_tree(tokens, torch.tensor([tree.parents] * 2)) == wanted
    reach = tree.ancestors_on(tokens.device).expand(2, -1, -1)
    assert paths_of_visible(tokens, reach) == [row[1:] for row in wanted]
    prefix = NodePrefix(lambda row: [row], [[5], [6]], tokens.device, lambda: wanted)
    assert prefix(1, 3).tolist() == [1, 6, 20, 22]
    assert prefix.select([1])(0, 3).tolist() == [1, 6, 20, 22]
