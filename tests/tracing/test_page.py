"""The page of a trace: one file without addresses, of bounded size, in which nothing is run."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from mmspec.tracing.jsonl import write_jsonl
from mmspec.tracing.page import MOST_STEPS, make_data, make_frame, make_page
from mmspec.tracing.trace import Trace
from tests.tracing.records import make_header, make_rounds

EVIL = "</script><script>alert(1)</script><!-- @script@ @data@ \u2028"


def read_data(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_a_page_holds_its_data_and_no_address() -> None:
    page = make_page(make_header(5), make_rounds(5))
    assert read_data(page) == json.loads(json.dumps(make_data(make_header(5), make_rounds(5))))
    assert set(re.findall(r"https?://[\w./]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page
    assert not re.search(r"@(title|style|script|data)@", page)


def test_markup_in_a_prompt_is_text() -> None:
    rounds = make_rounds(2)
    rounds[1]["rows"][0]["text"][0] = EVIL
    header = make_header(2, prompt=[EVIL], model=EVIL)
    page = make_page(header, rounds)
    assert "<script>alert" not in page
    assert page.count("</script>") == make_page(make_header(2), make_rounds(2)).count("</script>")
    data = read_data(page)
    assert data["asked"] == EVIL
    assert data["rounds"][1]["rows"][0]["text"][0] == EVIL


def test_a_thousand_tokens_are_less_than_three_megabytes() -> None:
    rounds = make_rounds(400, nodes=60)
    assert sum(len(one["rows"][0]["tokens"]) for one in rounds) == 1000
    assert len(make_page(make_header(400), rounds).encode()) < 3_000_000


def test_a_long_trace_is_thinned_and_says_so() -> None:
    rounds = [
        {**one, "round": number} for number, one in enumerate(make_rounds(21, nodes=6)[1:] * 2000)
    ]
    assert sum(len(one["rows"][0]["tokens"]) for one in rounds) == 100_000
    data = make_data(make_header(40_000), rounds)
    assert len(data["rounds"]) == MOST_STEPS
    assert "a step of the slider is 20 rounds" in data["notes"][0]
    steps = [one["rows"][0] for one in data["rounds"]]
    assert sum(len(one["text"]) for one in steps) == 100_000
    assert all(len(one["text"]) == len(one["kinds"]) for one in steps)
    assert sum(one["accepted"] for one in steps) == 60_000
    assert sum(one["seconds"][2] for one in data["rounds"]) == pytest.approx(0.005 * 40_000)
    assert len(make_page(make_header(40_000), rounds).encode()) < 8_000_000


def test_a_trace_without_rounds_has_a_page() -> None:
    data = read_data(make_page(make_header(0, 0), []))
    assert data["notes"] == ["This trace has no rounds: nothing was decoded."]
    assert data["rounds"] == []


def test_tokens_are_named_by_how_they_came() -> None:
    rounds = make_rounds(4, nodes=3)
    kinds = [step["rows"][0]["kinds"] for step in make_data(make_header(4), rounds)["rounds"]]
    assert kinds == ["f", "ac", "aac", "aaao"]  # the last draft was accepted whole
    gated = make_rounds(2, nodes=3)
    gated[1] |= {"calls": 0}
    gated[1]["rows"][0] |= {"corrected": False, "tokens": [1], "text": ["red"]}
    assert make_data(make_header(2), gated)["rounds"][1]["rows"][0]["kinds"] == "u"


def test_plain_decoding_is_measured_or_named_an_estimate() -> None:
    rounds = make_rounds(9)
    estimate = make_data(make_header(9), rounds)["plain"]
    assert not estimate["measured"]
    assert "not measured; it is estimated" in estimate["note"]
    assert "takes longer than one of plain decoding" in estimate["note"]
    tokens = sum(len(one["rows"][0]["tokens"]) for one in rounds)
    assert estimate["clock"][-1] == [pytest.approx(0.0055 * (tokens - 1)), tokens]
    measured = {"clock": [[0.5, 1], [0.75, 2]], "calls": 1, "is_same": True}
    plain = make_data(make_header(9, plain=measured), rounds)["plain"]
    assert plain["measured"]
    assert plain["clock"] == [[0.5, 1], [0.75, 2]]


def test_a_notebook_shows_the_whole_page(tmp_path: Path) -> None:
    header, rounds = make_header(9), make_rounds(9)
    write_jsonl(tmp_path / "run.jsonl", header, rounds)
    shown = Trace.load(tmp_path / "run.jsonl")._repr_html_()
    page = make_page(header, rounds)
    assert shown == make_frame(page)
    found = re.fullmatch(r'<iframe srcdoc="([^"]*)" title="A trace" style="[^"]*"></iframe>', shown)
    assert found is not None
    packed = re.search(r'atob\("([^"]*)"\)', html.unescape(found[1]))
    assert packed is not None
    assert gzip.decompress(base64.b64decode(packed[1])).decode() == page
    assert len(shown) < len(page) / 2
