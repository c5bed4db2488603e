"""What a round costs beside forwards: tensor operations, and reads by the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mmspec
from mmspec import zoo
from mmspec.draft import Round
from mmspec.zoo import language
from tests.covering import exhaustive

CASES: dict[str, tuple[int, dict[str, Any], int]] = {  # operations of a round, and its nodes
    "coupled": (60, {"length": 5}, 5),
    "coupled, sampled": (90, {"length": 5}, 5),
    "coupled, tree": (80, {"tree": [3, 2, 1, 1]}, 21),
    "coupled, tree, sampled": (90, {"tree": [3, 2, 1, 1]}, 21),
    "dynamic-tree": (135, {}, 16),
    "dynamic-tree, sampled": (168, {}, 16),
    "recursive-rejection": (80, {}, 21),
    "recursive-rejection, sampled": (140, {}, 21),
}
RARE = {
    "spec-infer, sampled": (150, {"tree": [3, 2, 1, 1]}, 21),
    "greedy-multi-draft, sampled": (150, {"tree": [3, 2, 1, 1]}, 21),
    "spechub, sampled": (150, {}, 14),
    "spectr, sampled": (150, {"tree": [3, 2, 1, 1]}, 21),
    "traversal, sampled": (172, {"tree": [3, 2, 1, 1]}, 21),
}
ALL = exhaustive(
    (*CASES, *RARE),
    ("coupled, sampled", "coupled, tree", "dynamic-tree, sampled", "recursive-rejection, sampled"),
)
AHEAD = 80  # more in a round that draws noise for the next ones too: at most one of these here


class Outside(TorchDispatchMode):
    """Counts operations while no model runs forward."""

    def __init__(self, *models: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.running = self.count = 0
        parts = [part for one in models for part in (one, one.get_decoder(), one.lm_head)]
        for part in parts:
            part.register_forward_pre_hook(lambda *_: self._run(1))
            part.register_forward_hook(lambda *_: self._run(-1))

    def _run(self, step: int) -> None:
        self.running += step

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not self.running
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", ALL)
def test_a_round_reads_one_tensor_and_runs_few_operations(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    most, options, nodes = {**CASES, **RARE}[case]
    recipe, *kind = case.split(", ")
    model, small, processor = zoo.load("llava"), zoo.load("llava-drafter"), zoo.processor("llava")
    (example,) = language.examples(1, "held-out", 0, kind="caption")
    text = language.format_prompt(processor, example.prompt)
    request = dict(processor(text=[text], images=[example.image], return_tensors="pt"))
    reads: list[str] = []
    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__"):
        own = getattr(torch.Tensor, name)

        def noted(self: Any, *args: Any, name: str = name, own: Any = own, **how: Any) -> Any:
            reads.append(name)
            return own(self, *args, **how)

        monkeypatch.setattr(torch.Tensor, name, noted)
    rounds: list[tuple[int, int, int]] = []
    fast = mmspec.accelerate(model, recipe, drafter=small, **options)
    how: dict[str, Any] = {"max_new_tokens": 32, "do_sample": "sampled" in kind}
    how |= {"seed": 0} if how["do_sample"] else {}
    fast.generate(**request, **how)  # what is made once for all rounds
    reads.clear()
    with Outside(model, small) as outside:
        fast.generate(
            **request,
            **how,
            on_round=lambda kept: rounds.append(_since(kept, outside, reads)),
        )
    full = [one for one in rounds[1:] if one[0] == nodes]  # the first round reads the prompt
    assert len(full) > 1, rounds
    assert {read for _, _, read in full} == {1}
    *usual, largest = sorted(operations for _, operations, _ in full)
    assert 0 < usual[0] <= usual[-1] <= most, rounds
    assert largest <= most + AHEAD * how["do_sample"], rounds


def _since(kept: Round, outside: Outside, reads: list[str]) -> tuple[int, int, int]:
    """Nodes drafted, operations and reads since the round before."""
    found = (kept.drafted[0], outside.count, len(reads))
    outside.count = 0
    reads.clear()
    return found
