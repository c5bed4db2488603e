"""A real vLLM against this package: the same texts, and the same drafts accepted.

The slow tests need vLLM in an environment of its own: `tools/vllm_env.sh FOLDER`, then
MMSPEC_VLLM_PYTHON=FOLDER/bin/python pytest -m slow tests/tools/test_vllm_proof.py
"""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
import torch

from tools import vllm_engine
from tools.vllm_proof import CASES, LENGTH, Report, compare, prove

PYTHON = os.environ.get("MMSPEC_VLLM_PYTHON")
BROKEN = {  # by errors of vLLM, and mended: see `tools.vllm_engine.Job`
    "qwen2.5-vl": "qwen2.5-vl, slots mended",
    "llava, dflash": "llava, dflash, keys mended",
}
slow = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(PYTHON is None, reason="MMSPEC_VLLM_PYTHON names no python with vLLM"),
]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("vllm")
    return dict(zip(CASES, prove(list(CASES.values()), Path(str(PYTHON)), folder), strict=True))


class TestEngine:
    pytestmark = slow

    @pytest.mark.parametrize("case", CASES)
    def test_output_is_that_of_plain_decoding(self, case: str, reports: dict[str, Report]) -> None:
        found = reports[case]
        assert found.requests >= 16
        assert found.identical == found.identical_batch == found.identical_here == found.requests

    @pytest.mark.parametrize("case", [name for name in CASES if name not in BROKEN])
    def test_the_same_drafts_are_accepted(self, case: str, reports: dict[str, Report]) -> None:
        """Draft for draft, but for ties that another kernel breaks; so also per position.

        vLLM's counters go on past the end of a text, by at most one draft per request.
        """
        found = reports[case]
        assert abs(found.drafts[0] - found.drafts[1]) <= found.requests  # of the last token, too
        assert found.same_drafts >= 0.98 * found.compared
        assert all(abs(there - here) < 0.02 for there, here in found.shares())
        pairs = zip(found.accepted_there, found.accepted_here, strict=True)
        assert all(-1 <= there - here <= found.requests for there, here in pairs)
        assert sum(found.accepted_there) > found.drafts[0]  # the head drafts well

    @pytest.mark.parametrize("case", BROKEN)
    def test_without_the_repair_drafts_differ(self, case: str, reports: dict[str, Report]) -> None:
        """Where this fails, vLLM has mended its error: drop the repair here and in the guide."""
        broken, mended = reports[case], reports[BROKEN[case]]
        assert broken.same_drafts < 0.97 * broken.compared
        assert mended.drafts[0] == mended.drafts[1]


def result(steps: list[int], **changes: object) -> vllm_engine.Result:
    tokens = list(range(sum(steps)))
    found: vllm_engine.Result = {
        "version": "0",
        "rows": [{"prompt": [1], "tokens": tokens, "steps": steps}],
        "batch": [tokens],
        "drafts": len(steps) - 1,
        "accepted_per_position": [2, 2, 1, 0, 0],
    }
    return {**found, **changes}  # type: ignore[typeddict-item]


def test_the_last_draft_of_a_request_is_not_compared() -> None:
    """Steps of 1, 4 and 2 tokens: 3 drafted ones were accepted, and 1 before the text ended."""
    there = result([1, 4, 2])
    found = compare([([1], list(range(7)), [3, 2])], there, there)
    assert (found.identical, found.identical_batch, found.identical_here) == (1, 1, 1)
    assert (found.compared, found.same_drafts) == (1, 1)
    assert found.shares() == [(1, 1)] * 3 + [(0, 0)] * (LENGTH - 3)


def test_other_texts_and_drafts_are_counted() -> None:
    there = result([1, 4, 2])
    found = compare([([1], list(range(7)), [2, 3])], there, result([7], batch=[[5]]))
    assert (found.identical, found.identical_batch, found.identical_here) == (1, 0, 1)
    assert (found.compared, found.same_drafts) == (1, 0)
    assert found.shares()[2] == (1, 0)
    assert compare([([1], [0], [3, 2])], there, there).identical_here == 0
    with pytest.raises(AssertionError, match="another prompt"):
        compare([([2], list(range(7)), [3, 2])], there, there)


def test_the_engine_needs_nothing_of_this_package() -> None:
    tree = ast.parse(Path(vllm_engine.__file__).read_text())
    found = {
        one.module if isinstance(one, ast.ImportFrom) else one.names[0].name
        for one in ast.walk(tree)
        if isinstance(one, ast.Import | ast.ImportFrom)
    }
    assert not [name for name in found if str(name).split(".")[0] in ("mmspec", "tools", "torch")]
