"""Parse a page in two stages: its regions as one batch, then the whole page (HSD).

    page = parse_page(fast, page_inputs, region_inputs, region_texts, processor)

Liao et al. 2026. The caller provides the regions and their draft texts, from a layout and OCR
pipeline; `fast` is a model accelerated with recipe `hsd` or `hsd-tolerance`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SEPARATOR = "\n\n"  # between the regions of a page, in reading order


@dataclass(frozen=True)
class ParsedPage:
    """Outputs of `generate` for a page and its regions."""

    output: Any
    regions: Any | None  # None without regions
    draft: str  # text of the regions, used as the draft of the page


def parse_page(
    fast: Any,
    page: Mapping[str, Any],
    regions: Mapping[str, Any] | None,
    drafts: Sequence[str],
    processor: Any,
    **settings: Any,
) -> ParsedPage:
    """Verify the drafts of all regions in one batch, then the page with the result as its draft.

    `page` and `regions` are inputs of `generate`: one row, and one row per region in reading order
    (padded on the left); `drafts` are the texts of the regions. Without `regions` the drafts are
    joined unverified. Greedy decoding with `hsd` gives the model's own page for any drafts. Raises
    ValueError if the numbers of drafts and regions differ.
    """
    tokenizer = vars(processor).get("tokenizer", processor)
    refined, found = list(drafts), None
    if regions is not None:
        found = fast.generate(**regions, **settings, drafter_inputs={"draft": list(drafts)})
        new = found.sequences[:, regions["input_ids"].shape[1] :]
        refined = tokenizer.batch_decode(new, skip_special_tokens=True)
    text = SEPARATOR.join(one.strip() for one in refined)
    output = fast.generate(**page, **settings, drafter_inputs={"draft": [text]})
    return ParsedPage(output, found, text)
