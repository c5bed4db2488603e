"""Which token stands behind an id, read off tokenizers' files: no tokenizer is made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

LEAST_SHARED = 0.99  # of the ids of two tokenizers
PADDING = 512  # most ids that vocabularies of one tokenizer differ by (Qwen: 128)


@dataclass(frozen=True)
class WordComparison:
    """How far two tokenizers agree; `remark` says where they do not."""

    ours: int
    theirs: int
    remark: str
    differs: bool  # in more than a few ids


def compared(ours: Mapping[str, int], theirs: Mapping[str, int]) -> WordComparison:
    """Two tables of tokens and their ids."""
    mine, other = ({number: word for word, number in table.items()} for table in (ours, theirs))
    shared = mine.keys() & other.keys()
    agreed = sum(mine[number] == other[number] for number in shared)
    least = min(len(mine), len(other))
    if agreed == least:
        return WordComparison(len(mine), len(other), "", False)
    wrong = next((n for n in sorted(shared) if mine[n] != other[n]), None)
    example = "" if wrong is None else f"; id {wrong} is {mine[wrong]!r} and {other[wrong]!r}"
    remark = f"only {agreed} of {least} ids stand for the same token{example}"
    return WordComparison(len(mine), len(other), remark, agreed < LEAST_SHARED * least)


def check_sizes(target: int, drafter: int) -> None:
    """Refuse a draft model whose vocabulary differs by more than padding. Raises ValueError."""
    if abs(target - drafter) > PADDING:
        raise ValueError(
            f"the draft model has a vocabulary of {drafter} tokens, the target one of {target}: "
            "their token ids do not mean the same; choose a draft model with the target's tokenizer"
        )


def check_words(target: str, drafter: str) -> None:
    """Refuse a draft model whose ids mean other tokens than the target's.

    Both are folders, or names of a hub whose files lie here already; without a tokenizer.json of
    both there is nothing to compare. Raises ValueError.
    """
    if target == drafter:
        return
    files = [_file(name) for name in (target, drafter)]
    contents = [file.read_bytes() for file in files if file is not None]
    if len(contents) < 2 or contents[0] == contents[1]:
        return
    ours, theirs = map(_table, contents)
    if not ours or not theirs:
        return
    found = compared(ours, theirs)
    if found.differs:
        raise ValueError(
            f"{drafter} cannot draft for {target}: {found.remark}; choose a draft model with the "
            "target's tokenizer"
        )


def _file(name: str) -> Path | None:
    """The tokenizer.json of a folder, or of a hub's name as far as it was downloaded."""
    if not name:
        return None
    if Path(name).is_dir():
        file = Path(name) / "tokenizer.json"
        return file if file.is_file() else None
    found = try_to_load_from_cache(name, "tokenizer.json") if name.count("/") == 1 else None
    return Path(found) if isinstance(found, str) else None


def _table(content: bytes) -> dict[str, int]:
    """Tokens and their ids; nothing where the file is damaged or of another kind."""
    try:
        made = json.loads(content)
        words, added = made["model"]["vocab"], made.get("added_tokens", [])
        table = words if isinstance(words, dict) else {w: n for n, (w, _) in enumerate(words)}
        return table | {one["content"]: one["id"] for one in added}
    except (ValueError, TypeError, KeyError):
        return {}
