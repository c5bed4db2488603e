"""What a trace holds is what was decoded, and it costs a request nothing but a few operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mmspec
from mmspec import zoo
from mmspec.zoo import language
from tests.covering import covering, limited

TOLERANCE = 2e-3  # of probabilities, which a trace holds with four digits


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any, Any]:
    return zoo.load("llava"), zoo.load("llava-drafter"), zoo.processor("llava")


def request_of(pair: tuple[Any, Any, Any], count: int = 1) -> dict[str, Any]:
    processor, examples = pair[2], language.examples(count, "held-out", 0, kind="caption")
    texts = [language.format_prompt(processor, one.prompt) for one in examples]
    images = [one.image for one in examples]
    return dict(processor(text=texts, images=images, padding=True, return_tensors="pt"))


def run(pair: tuple[Any, Any, Any], recipe: str, count: int = 1, **how: Any) -> tuple[Any, Any]:
    """A trace and the output of its request."""
    trace = mmspec.Trace(pair[2])
    fast = mmspec.accelerate(pair[0], recipe, drafter=pair[1])
    return trace, fast.generate(**request_of(pair, count), max_new_tokens=24, trace=trace, **how)


@pytest.mark.parametrize(
    ("how", "recipe"),
    limited(
        covering(
            [{"do_sample": False}, {"do_sample": True, "seed": 3}],
            ["coupled", "dynamic-tree", "recursive-rejection"],
            strength=1,
        ),
        2,
    ),
)
def test_a_trace_holds_what_was_decoded(
    pair: tuple[Any, Any, Any], recipe: str, how: dict[str, Any]
) -> None:
    trace, output = run(pair, recipe, 2, **how)
    rows = [row for one in trace.rounds for row in one["rows"]]
    stats = output.stats
    assert sum(len(row["tokens"]) for row in rows) == stats.num_new_tokens
    assert sum(len(row["draft"]) for row in rows) == stats.num_draft_tokens
    assert sum(row["accepted"] for row in rows) == stats.num_accepted_draft_tokens
    assert sum(one["calls"] for one in trace.rounds) == stats.target_calls
    seconds = sum(sum(one["seconds"].values()) for one in trace.rounds)
    assert seconds == pytest.approx(stats.total_seconds, rel=1e-2)
    for row in rows:
        path = [row["draft"][node] for node in row["path"]]
        assert row["tokens"][: row["accepted"]] == path
        parents = [-1, *row["path"]][: len(path)]
        assert [row["parents"][node] for node in row["path"]] == parents
    start = request_of(pair, 2)["input_ids"].shape[1]
    for row, new in enumerate(trace.list_tokens()):
        assert new == output.sequences[row, start : start + len(new)].tolist()
    header = trace.header
    assert (header["recipe"], header["drafter_saw"]) == (recipe, "pixels")
    assert header["stats"]["num_new_tokens"] == stats.num_new_tokens


@pytest.mark.parametrize(
    "recipe",
    [
        "coupled",
        "dynamic-tree",
        pytest.param("recursive-rejection", marks=pytest.mark.exhaustive),
    ],
)
def test_probabilities_are_those_of_both_models(pair: tuple[Any, Any, Any], recipe: str) -> None:
    trace, output = run(pair, recipe, do_sample=False)
    request, done, checked = request_of(pair), 0, 0
    start = request["input_ids"].shape[1]
    for round_ in trace.rounds[:4]:
        (row,) = round_["rows"]
        for node in range(1, len(row["draft"]), 4):
            path = list_path(row["parents"], node)
            tokens = [*output.sequences[0, : start + done].tolist()]
            tokens += [row["draft"][one] for one in path[:-1]]
            p, q = (read_next(model, request, tokens) for model in pair[:2])
            token = row["draft"][node]
            assert row["p"][node] == pytest.approx(p[token].item(), abs=TOLERANCE)
            assert row["q"][node] == pytest.approx(q[token].item(), abs=TOLERANCE)
            better = (p > p[token] * 1.01).sum().item()
            assert row["rank"][node] == pytest.approx(1 + better, abs=1)
            checked += 1
        done += len(row["tokens"])
    assert checked >= 3


def list_path(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


@torch.no_grad()
def read_next(model: Any, request: dict[str, Any], tokens: list[int]) -> torch.Tensor:  # (V,)
    """The model's own distribution after these tokens."""
    ids = torch.tensor([tokens])
    out = model(input_ids=ids, pixel_values=request["pixel_values"])
    return out.logits[0, -1].float().softmax(-1)  # type: ignore[no-any-return]


def test_a_traced_request_writes_the_same_and_reads_nothing_more(
    pair: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    for name in ("tolist", "item", "cpu", "numpy"):
        own = getattr(torch.Tensor, name)

        def noted(self: Any, *args: Any, name: str = name, own: Any = own, **how: Any) -> Any:
            reads.append(name)
            return own(self, *args, **how)

        monkeypatch.setattr(torch.Tensor, name, noted)
    fast = mmspec.accelerate(pair[0], "dynamic-tree", drafter=pair[1])
    request = {**request_of(pair), "max_new_tokens": 24}
    fast.generate(**request)
    reads.clear()
    plain = fast.generate(**request).sequences
    usual = list(reads)
    reads.clear()
    trace = mmspec.Trace()
    assert torch.equal(fast.generate(**request, trace=trace).sequences, plain)
    assert reads == usual
    reads.clear()
    assert trace.rounds
    assert reads.count("cpu") <= 6  # all rounds at once
    assert "item" not in reads


def test_every_entry_point_takes_a_trace(pair: tuple[Any, Any, Any], tmp_path: Path) -> None:
    fast = mmspec.accelerate(pair[0], "coupled", drafter=pair[1])
    request = {**request_of(pair), "max_new_tokens": 8, "do_sample": False}
    traces = [mmspec.Trace(pair[2]) for _ in range(4)]
    fast.generate(**request, trace=traces[0])
    list(fast.stream(**request, trace=traces[1]))
    pair[0].generate(**request, custom_generate=fast, trace=traces[2])
    fast.save_pretrained(tmp_path / "saved")
    again = mmspec.load(tmp_path / "saved", model=pair[0])
    again.generate(**request, trace=traces[3])
    tokens = [trace.list_tokens() for trace in traces]
    assert tokens == [tokens[0]] * 4
    assert len(tokens[0][0]) == 8


def test_words_are_the_text(pair: tuple[Any, Any, Any]) -> None:
    trace, _ = run(pair, "coupled", do_sample=False)
    tokens, tokenizer = trace.list_tokens()[0], pair[2].tokenizer
    text = "".join(word for one in trace.rounds for word in one["rows"][0]["text"])
    assert text == tokenizer.decode(tokens)
    drafted = [
        (token, word)
        for one in trace.rounds
        for token, word in zip(one["rows"][0]["draft"], one["rows"][0]["draft_text"], strict=True)
    ]
    assert drafted
    assert all(word.strip() == tokenizer.decode([token]) for token, word in drafted)
    assert "what does the" in trace.header["prompt"][0]


def test_a_file_holds_the_trace(pair: tuple[Any, Any, Any], tmp_path: Path) -> None:
    trace, _ = run(pair, "coupled", do_sample=False)
    plain, _ = run(pair, "coupled", do_sample=False)
    trace.race(plain)
    again = mmspec.Trace.load(trace.save(tmp_path / "run.jsonl"))
    assert again.header == trace.header
    assert again.rounds == trace.rounds
    assert again.header["plain"]["is_same"]
    assert again.header["plain"]["clock"][-1][1] == len(trace.list_tokens()[0])


def test_what_is_no_trace_is_refused(pair: tuple[Any, Any, Any], tmp_path: Path) -> None:
    trace, _ = run(pair, "coupled", do_sample=False)
    fast = mmspec.accelerate(pair[0], "coupled", drafter=pair[1])
    for given, why in ((trace, "already holds a request"), ("x.html", "trace='x.html' is not")):
        with pytest.raises(ValueError, match=why):
            fast.generate(**request_of(pair), trace=given)
    with pytest.raises(ValueError, match="cannot decode tokens"):
        mmspec.Trace(processor=3)
    with pytest.raises(ValueError, match="the trace is empty"):
        mmspec.Trace().save(tmp_path / "run.html")
    with pytest.raises(ValueError, match=r"must end in \.html"):
        trace.save(tmp_path / "run.png")
    fast.disable()
    with pytest.raises(ValueError, match="trace is an argument of mmspec"):
        fast.generate(**request_of(pair), trace=mmspec.Trace())
