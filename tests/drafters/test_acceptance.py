"""Heads that predict acceptance are read from their own files alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmspec.drafters.lengths.learned import StopHead
from mmspec.drafters.trees.c2t import TreeHead


def test_a_head_comes_back_from_its_file(tmp_path: Path) -> None:
    head, file = TreeHead(width=5), tmp_path / "tree.safetensors"
    head.save(file)
    features = torch.rand(4, 3)
    assert torch.equal(TreeHead.read(str(file))(features), head(features))
    assert TreeHead.read(head) is head
    with pytest.raises(ValueError, match=r"holds no stop head .* `mmspec train stop`") as refused:
        StopHead.load(file)
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="give a StopHead"):
        StopHead.read(head)
