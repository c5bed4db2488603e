"""The text of single tokens, as they continue the text before them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

UNFINISHED = "\ufffd"  # a character whose bytes are split over tokens


class Words:
    """Turns token ids into the text that each one adds; a processor or a tokenizer decodes."""

    def __init__(self, processor: Any, skips_special: bool = False) -> None:
        self.decoder, self.skips_special = processor, skips_special
        self.known: dict[tuple[int | None, int], str] = {}

    def spell(self, ids: Sequence[int], before: Sequence[int] = ()) -> Iterator[str]:
        """The text that each id adds after those `before`; "" within a split character."""
        window = list(before[-4:])
        shown = self._decode(window)
        for one in ids:
            window.append(one)
            text = self._decode(window)
            if text.endswith(UNFINISHED):
                yield ""
                continue
            yield text[len(shown) :] if text.startswith(shown) else self._decode([one])
            window = window[-4:]
            shown = self._decode(window)

    def spell_after(self, previous: int | None, token: int) -> str:
        """The text of a token after another one."""
        key = (previous, token)
        if key not in self.known:
            before = [] if previous is None else [previous]
            self.known[key] = next(self.spell([token], before)) or self._decode([token])
        return self.known[key]

    def _decode(self, ids: Sequence[int]) -> str:
        if not ids:
            return ""
        return str(self.decoder.decode(list(ids), skip_special_tokens=self.skips_special))


def add_text(rounds: Sequence[dict[str, Any]], processor: Any) -> None:
    """Add the `text` of accepted tokens, and the `draft_text` of drafted ones, to all rows."""
    words, texts = Words(processor), dict[tuple[int, int], list[int]]()
    for round_ in rounds:
        for index, row in enumerate(round_["rows"]):
            before = texts.setdefault((round_["part"], index), [])
            row["text"] = [*words.spell(row["tokens"], before)]
            last = before[-1] if before else None
            row["draft_text"] = [
                words.spell_after(last if parent < 0 else row["draft"][parent], token)
                for token, parent in zip(row["draft"], row["parents"], strict=True)
            ]
            before.extend(row["tokens"])
            del before[:-8]
