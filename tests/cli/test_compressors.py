"""Compressors on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmspec.compressors import COMPRESSORS
from mmspec.compressors.contract import SIGNALS
from tests.cli.running import fail, run

DOCS = Path(__file__).resolve().parents[2] / "docs" / "compressors.md"


def test_compressors_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    listed = {one["name"]: one for one in run(capsys, "compressors")}
    assert set(listed) == set(COMPRESSORS)
    assert listed["top-p-uniform"]["needs"] == ["question-attention"]
    assert listed["average-pool"]["kept of 576"] == 144
    assert {need for one in listed.values() for need in one["needs"]} == set(SIGNALS)
    assert [name for name, one in listed.items() if one["trained"]] == [
        *("conv", "elastic-gate", "latent", "q-former", "resampler", "space-to-depth"),
    ]


def test_every_compressor_stands_in_the_guide() -> None:
    text = DOCS.read_text()
    assert [name for name in COMPRESSORS if f"`{name}`" not in text] == []


ASKED = ("generate", "--image", "zoo:scene", "--prompt", "What is there?", "--no-compare")


@pytest.mark.parametrize(
    ("compressor", "message"),
    [
        ("pool", "there is no compressor 'pool'"),
        ("attn-topk:keep=0", "keep=0 is not a share of the tokens; give one in (0, 1]"),
        ("resampler", "has trained parameters, and none were given"),
    ],
)
def test_a_bad_one_is_one_line(
    compressor: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, line = fail(capsys, *ASKED, "--compressor", compressor)
    assert message in line


def test_a_picture_is_described_through_one(capsys: pytest.CaptureFixture[str]) -> None:
    asked = (*ASKED, "--max-new-tokens", "8")
    plain = run(capsys, *asked)
    thin = run(capsys, *asked, "--compressor", "top-p-uniform:keep=0.5")
    assert thin["text"] == plain["text"]
