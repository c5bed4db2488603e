"""Tokens of one tokenizer in another one, for draft models of another family.

target   "the" " light" "house"        shared: "the"; " light" and "house" are
draft    "the" " lighthouse"           written as what the draft tokenizer makes of their text
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from mmspec.errors import format_value
from mmspec.models.compatibility import compare_vocabularies, find_tokenizer

SPACES = ("\u2581", "\u0120")  # of SentencePiece, of byte-level tokenizers
WINDOW = 16  # committed tokens that are encoded again with a draft


@dataclass(frozen=True)
class OtherVocabulary:
    """A draft model whose tokenizer is not the target's: `accelerate(model, drafter=...)`.

    `tokenizer` is the draft model's, `target_tokenizer` the target's; either may be a processor.
    Models that were loaded from folders or hub names with tokenizers need no such object.
    """

    model: Any
    tokenizer: Any
    target_tokenizer: Any

    def __post_init__(self) -> None:
        for name in ("tokenizer", "target_tokenizer"):
            if not callable(getattr(_own(getattr(self, name)), "get_vocab", None)):
                raise ValueError(
                    f"{name}={format_value(getattr(self, name))} is no tokenizer of transformers; "
                    "give that of the model, or its processor"
                )

    @property
    def differs(self) -> bool:
        """Whether more than a few ids mean other tokens."""
        tables = [_own(one).get_vocab() for one in (self.target_tokenizer, self.tokenizer)]
        return compare_vocabularies(*tables).differs


@dataclass(frozen=True)
class Translation:
    """Two tokenizers. None for both: the vocabularies are equal, and ids are kept.

    `hidden` are target ids that no draft model reads, such as image placeholders.
    """

    target: Any
    draft: Any
    hidden: frozenset[int] = frozenset()

    @classmethod
    def of(cls, source: OtherVocabulary, hidden: Collection[int]) -> Translation:
        """The translation of a draft model."""
        return cls(_own(source.target_tokenizer), _own(source.tokenizer), frozenset(hidden))

    @cached_property
    def shared(self) -> dict[int, int]:
        """Target ids of tokens that are in both vocabularies, and their draft ids."""
        found = dict(self._shared_texts)
        ours, theirs = (one.get_vocab() for one in (self.target, self.draft))
        special = {*self.target.all_special_tokens} & {*self.draft.all_special_tokens}
        found |= {ours[text]: theirs[text] for text in special}
        for role in ("eos_token_id", "bos_token_id"):
            own, other = getattr(self.target, role), getattr(self.draft, role)
            if own is not None and other is not None:
                found[own] = other
        return found

    @property
    def share(self) -> float:
        """The share of draft tokens that the target has; special ones do not count."""
        return len(set(self._shared_texts.values())) / max(len(_texts(self.draft)), 1)

    def read_prompt(self, ids: Sequence[int]) -> list[int]:
        """A prompt in draft ids; there is always a token."""
        kept = [id for id in ids if id not in self.hidden]
        if self.target is None:
            return kept
        made: list[int] = self.draft(self._text(kept))["input_ids"]
        return made or self._first()

    def encode(self, ids: Sequence[int]) -> list[int]:
        """Generated tokens in draft ids, by their text."""
        if self.target is None:
            return list(ids)
        made: list[int] = self.draft(self._text(ids), add_special_tokens=False)["input_ids"]
        return made

    def translate(self, ids: Iterable[int]) -> list[int]:
        """Generated tokens in draft ids, one after the other."""
        return [piece for id in ids for piece in self._pieces(id)]

    def continue_with(
        self, ids: Sequence[int], tail: Sequence[int], new: Sequence[int]
    ) -> list[int]:
        """What drafted tokens are in target ids.

        `ids` are the last committed target tokens, `tail` those in draft ids, `new` the drafted
        ones, which end at an end token.
        """
        if self.target is None:
            return list(new)
        end = self.draft.eos_token_id
        has_end = end in new
        kept = list(new)[: new.index(end)] if has_end else list(new)
        before = self.draft.decode([*tail], skip_special_tokens=True)
        text = self.draft.decode([*tail, *kept], skip_special_tokens=True)[len(before) :]
        shown = self._text(ids) + text
        made: list[int] = self.target(shown, add_special_tokens=False)["input_ids"]
        if made[: len(ids)] == list(ids):
            made = made[len(ids) :]
        else:  # the text is encoded otherwise than it was generated
            made = self.target(text, add_special_tokens=False)["input_ids"]
        if has_end and self.target.eos_token_id is not None:
            made = [*made, self.target.eos_token_id]
        return made

    @cached_property
    def _shared_texts(self) -> dict[int, int]:
        theirs = _texts(self.draft)
        return {id: theirs[text] for text, id in _texts(self.target).items() if text in theirs}

    def _pieces(self, id: int) -> list[int]:
        if self.target is None:
            return [id]
        if id in self.hidden:
            return []
        if id not in self.shared:
            return self.encode([id])
        return [self.shared[id]]

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.target.decode([*ids], skip_special_tokens=True))

    def _first(self) -> list[int]:
        own = self.draft.bos_token_id
        return [0 if own is None else own]


def find_tokenizers(target: Any, drafter: Any) -> OtherVocabulary | None:
    """A draft model with both tokenizers, where those of both models are known.

    They are in the folders that the models were loaded from, or in the cache of hub names.
    """
    files = [find_tokenizer(str(one.config._name_or_path)) for one in (drafter, target)]
    folders = [str(file.parent) for file in files if file is not None]
    found = [_load(folder) for folder in folders]
    if len(found) < 2 or any(one is None for one in found):
        return None
    return OtherVocabulary(drafter, *found)


@lru_cache(maxsize=8)
def _load(folder: str) -> Any | None:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)  # else it may prompt
    except Exception:  # damaged files raise whatever their reader raises; ids are compared then
        return None


def _own(tokenizer: Any) -> Any:
    """The tokenizer of a processor."""
    return getattr(tokenizer, "tokenizer", tokenizer)


def _texts(tokenizer: Any) -> dict[str, int]:
    """Tokens with plain spaces for the sign that a tokenizer writes; special ones are left out."""
    special = set(tokenizer.all_special_ids)
    found: dict[str, int] = {}
    for text, id in tokenizer.get_vocab().items():
        if id not in special:
            first = " " + text[1:] if text.startswith(SPACES) else text
            found.setdefault(first, id)
    return found
