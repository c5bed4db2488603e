"""Two branches in one batch: padding, memory and errors. Pictures: tests/modalities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from mmspec.draft import Draft, Kind
from mmspec.targets.memory import build_block
from mmspec.targets.readers.backbone import Backbone
from mmspec.targets.readers.guidance import Guided, GuidedMemory, join_prompts
from mmspec.targets.readers.reader import Family
from mmspec.trees import Tree
from tests import toys
from tests.toys.image_models import pad_prompts


def test_prompts_of_different_lengths_are_padded_on_the_left() -> None:
    cond, uncond = pad_prompts([[1, 2, 3], [4, 5]]), {"input_ids": torch.tensor([[7], [8]])}
    both, shift = join_prompts(cond, uncond)
    assert shift == 0
    assert both["input_ids"].tolist() == [[1, 2, 3], [0, 4, 5], [0, 0, 7], [0, 0, 8]]
    assert both["attention_mask"].tolist() == [[1, 1, 1], [0, 1, 1], [0, 0, 1], [0, 0, 1]]
    both, shift = join_prompts(uncond, cond)
    assert shift == 2
    assert both["attention_mask"].tolist() == [[0, 0, 1], [0, 0, 1], [1, 1, 1], [0, 1, 1]]
    features = {"condition": torch.ones(1, 2, 3), "attention_mask": torch.ones(1, 2)}
    wide, _ = join_prompts(
        features, {"condition": torch.ones(1, 3, 3), "attention_mask": torch.ones(1, 3)}
    )
    assert wide["condition"][0].sum(-1).tolist() == [0, 3, 3]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral-sliding", "gemma3-text", "lfm2"])
@torch.no_grad()
def test_a_tree_is_guided_like_its_paths_from_scratch(family: str) -> None:
    """Any causal model can be guided: masks, windows and recurrent states are the backbone's."""
    toy = toys.model(family)
    guided = Guided(Backbone(toy, Family(is_direct=family != "lfm2")))
    texts, others = [[5, 6, 7, 8], [9, 10]], [[11], [12, 13, 14, 15, 16, 17]]
    inputs = {**pad_prompts(texts), "guidance_scale": 2.5, "negative": pad_prompts(others)}
    memory, first, _ = guided.prefill(inputs, extra_slots=16)
    assert isinstance(memory, GuidedMemory)
    assert memory.lengths == [4, 4]
    tree = Tree((-1, 0, 0)) if guided.can_branch else Tree.chain(2)
    paths = [[], [0], [0, 1], [0, 2]] if guided.can_branch else [[], [0], [0, 1]]
    tokens = torch.tensor([[20, 21, 22], [30, 31, 32]])[:, : tree.nodes]
    drafted = Draft.from_tree(tree, tokens, Kind.DET)
    start = [[18], [19]]
    logits, _ = guided.read(memory, build_block(start, drafted, memory.like))
    for row in range(2):
        assert_close(first[row], reference(toy, texts[row], others[row], []), atol=2e-3, rtol=1e-3)
        for place, path in enumerate(paths):
            new = start[row] + tokens[row, path].tolist()
            expected = reference(toy, texts[row], others[row], new)
            assert_close(logits[row, place], expected, atol=2e-3, rtol=1e-3)
    if guided.can_branch:  # rows keep different paths, in both branches
        memory.commit([1, 1], [(0, 2), ()], 3)
        assert memory.lengths == [7, 5]
        logits, _ = guided.read(memory, build_block([[40], [41]], None, memory.like))
        for row, new in enumerate(([18, 20, 22, 40], [19, 41])):
            expected = reference(toy, texts[row], others[row], new)
            assert_close(logits[row, -1], expected, atol=2e-3, rtol=1e-3)


def reference(toy: Any, text: list[int], other: list[int], new: list[int]) -> torch.Tensor:
    each = (toy(torch.tensor([ids + new])).logits[0, -1] for ids in (text, other))
    cond, uncond = (logits.log_softmax(-1) for logits in each)
    guided: torch.Tensor = uncond + 2.5 * (cond - uncond)
    return guided


def test_prompts_that_do_not_go_together_are_refused() -> None:
    guided = Guided(Backbone(toys.model("llama"), Family(is_direct=True)))
    inputs: dict[str, Any] = {**pad_prompts([[5, 6]]), "guidance_scale": 2.0}
    with pytest.raises(ValueError, match="needs an unconditional prompt"):
        guided.prefill(inputs, 4)
    with pytest.raises(ValueError, match="1 prompts have 2 unconditional"):
        guided.prefill({**inputs, "negative": pad_prompts([[1], [2]])}, 4)
    with pytest.raises(ValueError, match="give both the same inputs"):
        guided.prefill({**inputs, "negative": {"inputs_embeds": torch.zeros(1, 1, 64)}}, 4)
