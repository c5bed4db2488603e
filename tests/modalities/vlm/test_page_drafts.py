"""Benchmarks give recipes that take a text that of a parser, of each request's own images."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmspec import recipes, zoo
from mmspec.api import accelerate
from mmspec.drafters.neural.draft_inputs import CAPTIONS
from mmspec.modalities.vlm import LanguageSettings
from mmspec.modalities.vlm.formatting import LanguageFormatter
from mmspec.modalities.vlm.measures import workload
from mmspec.modalities.vlm.page_drafts import KNOWN, PageTexts, ParsedPages, with_page_drafts
from mmspec.modality import Selection, Workload
from mmspec.zoo.language import examples
from mmspec.zoo.page_text import read_picture


@pytest.mark.exhaustive
def test_requests_bring_the_text_of_their_own_images() -> None:
    images = [[one.image] for one in examples(2, "held-out", 1)]
    made = [{"input_ids": torch.zeros(1, 2, dtype=torch.int64)} for _ in images]
    pages = PageTexts(made, images)
    found = [pages.of({**request, "max_new_tokens": 1}) for request in made[::-1]]
    assert found == [[read_picture(images[at][0], KNOWN, at)] for at in (1, 0)]
    assert found[0] != found[1]


def test_other_recipes_and_own_texts_stay_as_they_are() -> None:
    plain: Any = SimpleNamespace()
    work = with_page_drafts(Workload(timed=[], plain=plain, fast=lambda fast: plain), [])
    hsd = recipes.get("hsd")
    own = {**hsd.options, "draft_file": "page.txt"}
    for recipe in (recipes.get("coupled"), SimpleNamespace(options=own)):
        assert work.fast(SimpleNamespace(recipe=recipe)) is plain
    assert isinstance(work.fast(SimpleNamespace(recipe=hsd)), ParsedPages)


def test_recipes_with_a_view_of_captions_get_them() -> None:
    plain: Any = SimpleNamespace()
    work = with_page_drafts(Workload(timed=[], plain=plain, fast=lambda fast: plain), [])
    own = recipes.get("tabed")
    captioned = replace(own, options={**own.options, "views": ["pixels", "caption"]})
    assert work.fast(SimpleNamespace(recipe=own)) is plain
    runner = work.fast(SimpleNamespace(recipe=captioned))
    assert isinstance(runner, ParsedPages)
    assert runner.key == CAPTIONS


@pytest.mark.exhaustive
def test_hsd_drafts_in_a_benchmark() -> None:
    model = zoo.load("llava")
    formatter = LanguageFormatter("zoo:llava", model, LanguageSettings(max_new_tokens=48))
    work = workload(model, formatter, LanguageSettings(kind="caption"), Selection(None, 2, 1, 0))
    fast = accelerate(model, "hsd", processor=formatter.processor, window=2)
    for request in work.timed:
        found = work.fast(fast).run(request, 0)
        assert found.values == work.plain.run(request, 0).values
        assert found.stats is not None
        assert found.stats.num_accepted_draft_tokens > 0
