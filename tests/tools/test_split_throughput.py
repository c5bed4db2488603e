"""A tiny model split over two processes is measured beside one process."""

from __future__ import annotations

import re

import pytest

from tools import split_throughput


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_are_measured_beside_one(capsys: pytest.CaptureFixture[str]) -> None:
    split_throughput.main(["--shape", "tiny", "--tokens", "16"])
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "the first 16 of 16 tokens are those of one process"
    assert [line.split(":")[0] for line in lines] == ["tiny, plain", "tiny, chain of 5"]
    assert all(
        re.search(r": [\d.]+ tokens/s, [\d.]+ by 2 processes \([\d.]+x\)$", line) for line in lines
    )
