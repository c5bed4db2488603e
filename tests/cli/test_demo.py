"""The page of `mmspec demo`: its forms become options, its answers come with their trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mmspec import registry
from mmspec.cli import demo
from mmspec.cli.options import ModelOptions
from mmspec.draft import Round, Verdict
from tests.cli.running import fail


class Letters:
    """A tokenizer whose tokens are letters, markup among them."""

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return "".join("ab<>&"[one] for one in ids)


def make_round(tokens: tuple[int, ...], accepted: int) -> Round:
    lengths = torch.tensor([accepted])
    verdict = Verdict(lengths[None], lengths, lengths)
    path = (tuple(range(accepted)),)
    return Round(1, (3,), (accepted,), path, (True,), (tokens,), (False,), verdict)


def test_words_come_as_text_with_accepted_ones_underlined() -> None:
    live = demo.Live(Letters())
    live.add(make_round((0, 1), 1))
    shown = live.add(make_round((2, 3, 4), 2))
    assert "<p><u>a</u><span>b</span><u>&lt;</u><u>&gt;</u><span>&amp;</span></p>" in shown
    assert "5 new, 3 of 6 drafted accepted, round 2" in shown


def test_a_form_becomes_options() -> None:
    owner = registry.get("vlm")
    fields = demo._list_fields(owner)
    usual = {one.name: one.default for one in fields}
    values = [{**usual, "max_new_tokens": 8, "image": "zoo:scene"}[one.name] for one in fields]
    given = ["zoo:llava", "coupled", 3, "length=2\n\n", "", "3,2", "", *values]
    options = demo.make_options(owner, demo.PARTS, fields, given)
    settings = {"max_new_tokens": 8, "image": "zoo:scene"}
    assert options == ModelOptions(
        "zoo:llava",
        "vlm",
        recipe=["coupled"],
        seed=3,
        overrides=["length=2"],
        tree="3,2",
        settings=settings,
    )
    assert "prompt-lookup" in demo._list_recipes(owner, "zoo:llava")
    assert demo._list_recipes(owner, "/nowhere") == []


def test_an_answer_comes_with_its_trace() -> None:
    settings = {"image": "zoo:scene", "max_new_tokens": 6}
    options = ModelOptions("zoo:llava", "vlm", recipe=["coupled"], settings=settings)
    *before, last = demo.generate(options, "describe the picture")
    assert len(before) > 1
    assert not any(update[1] or update[4] for update in before)
    live, text, picture, sound, trace = last
    assert text.startswith("the picture shows")
    assert "<u> picture</u>" in live
    assert (picture, sound) == (None, None)
    assert trace.startswith("<iframe srcdoc=")
    assert 'sandbox="allow-scripts"' in trace


def test_without_gradio_the_extra_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    assert "install mmspec[demo]" in fail(capsys, "demo")[1]


@pytest.mark.slow
def test_every_modality_with_models_has_a_tab() -> None:
    gradio = pytest.importorskip("gradio")
    config = demo.build(gradio).get_config_file()
    tabs = [one["props"]["label"] for one in config["components"] if one["type"] == "tabitem"]
    assert tabs == [name for name, one in registry.modalities().items() if one.zoo]
