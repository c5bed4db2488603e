"""Which models are sharded, in one process. Two processes: tests/cli/test_train_sharded.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmspec.targets.readers.attention_tap import LAST, AttentionTap, check_whole, is_sharded
from mmspec.training.sharding import check_sharded, whole_weight
from tests import toys
from tests.toys.readers import backbone


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> Any:
    model = toys.model("llava")
    monkeypatch.setattr(type(model), "tp_size", 2)
    return model


def test_a_whole_model_is_read_as_it_is() -> None:
    model = toys.model("llava")
    assert not is_sharded(model)
    assert not is_sharded(torch.nn.Linear(2, 2))
    check_whole(model, "attention")
    weight = model.get_output_embeddings().weight
    assert whole_weight(model, weight) is weight
    with pytest.raises(ValueError, match="is not split over processes; drop --shard-target"):
        check_sharded(model, 2)


def test_what_a_process_has_a_share_of_is_refused(half: Any) -> None:
    assert is_sharded(half)
    with pytest.raises(ValueError, match=r"reads attention of a Llava.*each process holds a share"):
        AttentionTap(backbone(half), frozenset({LAST}), [1])
    weight = half.get_output_embeddings().weight
    assert whole_weight(half, weight) is weight  # not split by this plan


def test_heads_are_counted(half: Any) -> None:
    heads = half.config.get_text_config().num_key_value_heads
    check_sharded(half, heads)
    with pytest.raises(ValueError, match="cannot be shared by 7 processes; launch a number that"):
        check_sharded(half, 7)
