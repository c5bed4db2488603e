"""A page is parsed in two stages: its regions side by side, then the whole page (HSD).

    page = parse_page(fast, inputs_of_the_page, inputs_of_the_crops, texts_of_the_crops, processor)

Liao et al. 2026. What finds the regions and reads them first, a layout and OCR pipeline, is the
caller's; `fast` is an accelerated model under recipe `hsd`, or `hsd-tolerance`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SEPARATOR = "\n\n"  # between the regions of a page, in reading order


@dataclass(frozen=True)
class ParsedPage:
    """What the model reads on a page, and on its regions; outputs of `generate`."""

    output: Any
    regions: Any | None  # None where there were none
    draft: str  # what the regions became, which was the draft of the page


def parse_page(
    fast: Any,
    page: Mapping[str, Any],
    regions: Mapping[str, Any] | None,
    drafts: Sequence[str],
    processor: Any,
    **settings: Any,
) -> ParsedPage:
    """Verify the draft of each region in one batch, then the page with what came out as its draft.

    `page` and `regions` are inputs of `generate`, of one row and of a row per region in reading
    order (padded on the left); `drafts` are the regions' texts. Without `regions` the drafts make
    up the page's as they are. Greedy and under `hsd` the page is what the model itself writes,
    whatever the regions became. Raises ValueError for another number of drafts than of regions.
    """
    words = vars(processor).get("tokenizer", processor)
    refined, found = list(drafts), None
    if regions is not None:
        found = fast.generate(**regions, **settings, drafter_inputs={"draft": list(drafts)})
        new = found.sequences[:, regions["input_ids"].shape[1] :]
        refined = words.batch_decode(new, skip_special_tokens=True)
    text = SEPARATOR.join(one.strip() for one in refined)
    output = fast.generate(**page, **settings, drafter_inputs={"draft": [text]})
    return ParsedPage(output, found, text)
