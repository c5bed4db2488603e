from typing import Any

import pytest
import torch

from mmspec.zoo import train
from mmspec.zoo.catalogue import load_folder
from tools.zoo.vlm.evaluate import acceptance_length
from tools.zoo.vlm.train import PLANS


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("llava-drafter", marks=pytest.mark.exhaustive),
        pytest.param("llava-text-drafter", marks=pytest.mark.slow),
        pytest.param("qwen2.5-vl", marks=pytest.mark.slow),
        pytest.param("llava", marks=pytest.mark.slow),
    ],
)
def test_training_writes_a_checkpoint_that_loads(name: Any, tmp_path: Any) -> None:
    stages = []
    report = train(name, tmp_path, steps=1, progress=lambda *told: stages.append(told[0]))
    sees = not name.endswith("text-drafter")
    model = load_folder(tmp_path, sees)
    assert report["parameters"] == sum(p.numel() for p in model.parameters())
    assert stages[-1] == ("see anywhere" if PLANS[name].invariance_stages else "talk")
    assert ("see" in stages) == sees
    assert f"zoo train {name}" in (tmp_path / "README.md").read_text()


@pytest.mark.slow
def test_training_is_a_function_of_its_seed(tmp_path: Any) -> None:
    for run in ("one", "two"):
        train("llava-text-drafter", tmp_path / run, steps=1, seed=5)
    one, two = (load_folder(tmp_path / run, sees=False).state_dict() for run in ("one", "two"))
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize(
    ("follows", "tokens_per_round"),
    [
        ([True] * 12, 6.0),  # two rounds of five accepted drafts and one more token
        ([False] * 4, 1.0),
        ([True, False, True, True, False], 2.5),
        ([], 0.0),
    ],
)
def test_acceptance_length_counts_tokens_per_round(follows: Any, tokens_per_round: Any) -> None:
    assert acceptance_length(torch.tensor(follows, dtype=torch.bool), k=5) == tokens_per_round
