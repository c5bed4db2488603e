"""A head knows its target by what that says, and is refused on another one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import mmspec
from mmspec.models.fingerprint import KEY, check_signed, fingerprint, sign
from mmspec.models.heads.feature_head import load_head
from tests import toys
from tests.drafters.heads import untrained
from tests.toys.readers import backbone


def _another(family: str) -> object:
    """The same sizes, with another output head."""
    other = toys.model(family)
    with torch.no_grad():
        other.get_output_embeddings().weight.normal_(generator=torch.Generator().manual_seed(9))
    return other


@pytest.mark.parametrize("family", ["llama", "llava", "qwen2_5_vl"])
def test_dtypes_of_one_target_pass_and_another_target_does_not(family: str) -> None:
    head = untrained(toys.model(family))
    sign(head, backbone(toys.model(family)))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        check_signed(head, backbone(toys.model(family).to(dtype)))
    with pytest.raises(ValueError, match=r"FeatureHead was made for another target than"):
        mmspec.accelerate(_another(family), "eagle-2", drafter=head)


def test_a_note_is_written_when_a_head_is_saved_and_read_with_it(tmp_path: Path) -> None:
    """An old head without a note loads; what `save_pretrained` writes of it has one."""
    target, head = toys.model("llama"), untrained(toys.model("llama"))
    head.save_pretrained(tmp_path / "old")
    assert KEY not in vars(load_head(tmp_path / "old").config)
    mmspec.accelerate(_another("llama"), "eagle", drafter=tmp_path / "old")
    mmspec.accelerate(target, "eagle", drafter=tmp_path / "old").save_pretrained(tmp_path / "new")
    drafter = tmp_path / "new" / "drafter"
    assert vars(load_head(drafter).config)[KEY] == fingerprint(backbone(target))
    mmspec.accelerate(target, "eagle", drafter=drafter)
    with pytest.raises(ValueError, match="made for another target"):
        mmspec.accelerate(_another("llama"), "eagle", drafter=drafter)


def test_a_target_without_weights_says_nothing() -> None:
    with torch.device("meta"):
        blank = toys.model("llama").to("meta")
    assert fingerprint(backbone(blank)) is None
