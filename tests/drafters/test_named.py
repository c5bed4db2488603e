"""Names of lengths and trees take parameters."""

from __future__ import annotations

import pytest

from mmspec.drafters.lengths.goodput import parse
from mmspec.drafters.lengths.learned import Disco, SpecDecPP, StopHead
from mmspec.drafters.lengths.length import Entropy, Fixed
from mmspec.drafters.shapes import shape_of
from mmspec.drafters.trees.dynamic_tree import DynamicTree


def test_parameters_after_the_colon() -> None:
    assert parse("entropy") == Entropy()
    assert parse("entropy:h=0.4,max_length=3") == Entropy(h=0.4, max_length=3)
    assert shape_of(None, "dynamic:depth=3,nodes=9", None) == DynamicTree(depth=3, nodes=9)
    assert parse(4) == Fixed(4)


def test_a_learned_length_is_given_by_its_file(tmp_path: object) -> None:
    file = f"{tmp_path}/a, b=1.safetensors"
    StopHead().save(file)
    made = parse(f"specdec-pp:threshold=0.5,head={file},max_length=3")
    assert isinstance(made, SpecDecPP)
    assert (made.threshold, made.max_length) == (0.5, 3)
    assert isinstance(parse(f"disco:head={file}"), Disco)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("entropy:g=1", "'g=1' is not a parameter of 'entropy'; it has h=0.3"),
        ("entropy:h=x", "'h=x' gives no float"),
        ("entropy:c=-1", "c=-1 must be a number of at least 0"),
        ("adaptive-entropy:step=NaN", "step=nan must be a number of at least 0"),
        ("confidence:threshold=40", "threshold=40 must be a number of at least 0 and at most 1"),
        ("specdec-pp", "'specdec-pp' has no default for head; give it .* specdec-pp:head=FILE"),
        ("specdec-pp:head=nowhere", "nowhere holds no stop head"),
        ("entropies", "length='entropies' is not a draft length"),
        ("dynamic:kinds=x", "is not a draft length"),
    ],
)
def test_a_wrong_parameter_is_refused(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(spec)


def test_only_simple_parameters_have_names() -> None:
    with pytest.raises(ValueError, match="'kinds=x' is not a parameter of 'dynamic'"):
        shape_of(None, "dynamic:kinds=x", None)
