"""Texts of bundled images, for recipes that take a draft or a caption: what a parser reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from PIL import Image

from mmspec.drafters.lookup.given_text import DRAFT
from mmspec.drafters.neural.draft_inputs import CAPTIONS
from mmspec.modalities.common.measures import SpeculativeGenerate
from mmspec.modality import Runner, RunResult, Speculative, Workload
from mmspec.zoo.page_text import read_picture

KNOWN = 0.8  # share of the things in an image that the parser finds
TEXT_OPTION = "draft_file"  # of recipes that take a text


def with_page_drafts(work: Workload, images: Sequence[Sequence[Image.Image]]) -> Workload:
    """The workload, whose requests bring a text of their `images` to recipes that take one.

    A recipe with a text of its own (`draft_file`) keeps that. Those with a view of captions get
    the same texts for them.
    """
    pages = PageTexts(work.timed, images)

    def make_runner(fast: Any) -> Runner:
        options = fast.recipe.options
        if TEXT_OPTION in options and options[TEXT_OPTION] is None:
            return ParsedPages(fast, pages, DRAFT)
        if "caption" in options.get("views", ()):
            return ParsedPages(fast, pages, CAPTIONS)
        return work.fast(fast)

    return replace(work, fast=make_runner, supplies=(TEXT_OPTION,))


@dataclass(frozen=True)
class PageTexts:
    """The texts of the images of requests, read when they are first needed."""

    requests: Sequence[Mapping[str, Any]]
    images: Sequence[Sequence[Image.Image]]

    @cached_property
    def texts(self) -> list[list[str]]:
        return [[read_picture(one, KNOWN, at) for one in row] for at, row in enumerate(self.images)]

    def of(self, request: Mapping[str, Any]) -> list[str]:
        """The texts of the rows of a request, which has the same tensor of ids."""
        ids = request["input_ids"]
        return next(
            texts
            for one, texts in zip(self.requests, self.texts, strict=True)
            if one["input_ids"] is ids
        )


@dataclass(frozen=True)
class ParsedPages(Speculative):
    """A recipe that takes a text, with that of the images of each request."""

    pages: PageTexts
    key: str  # of `drafter_inputs`

    def run(self, request: Mapping[str, Any], seed: int) -> RunResult:
        given = {**request, "drafter_inputs": {self.key: self.pages.of(request)}}
        return SpeculativeGenerate(self.fast).run(given, seed)

    def run_first_token(self, request: Mapping[str, Any], seed: int) -> RunResult:
        return self.run({**request, "max_new_tokens": 1}, seed)
