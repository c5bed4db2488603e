"""The picture of the README's first command: drawn again, with the counts of the run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image

from mmspec import zoo
from tools import decode_picture


@pytest.mark.skipif(not zoo.is_present("llava"), reason="the zoo is not trained")
def test_the_picture_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decode_picture, "FILE", tmp_path / "decode.png")
    decode_picture.main()
    drawn = Image.open(tmp_path / "decode.png").convert("RGB")
    assert drawn.width == decode_picture.WIDTH
    colours = {colour for _, colour in drawn.getcolors(1 << 20) or ()}
    first = decode_picture.COLOURS[0].lstrip("#")
    assert tuple(bytes.fromhex(first)) in colours
    counts = [int(number) for number in re.findall(r"\d+", capsys.readouterr().out)]
    words, calls, plain_calls = counts
    assert calls < words <= plain_calls
