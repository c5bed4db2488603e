"""What the tokens of a tokenizer are as bytes, for grammars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

UNKNOWN = "\ufffd"  # of bytes that are no character


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that a grammar's matchers know."""

    tokens: Any  # `llguidance.LLTokenizer`
    size: int  # tokens that the model predicts; `tokens` may have more
    has_words: bool  # whether tokens are texts, so that not every text can be written
    drops_space: bool  # whether a text loses the space before its first word
    eos: frozenset[int]


def import_llguidance() -> Any:
    """The package of grammars. Raises ValueError where it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise ValueError(
            "a grammar needs the package llguidance; pip install 'mmspec[grammar]'"
        ) from error
    return llguidance


def read_vocabulary(tokenizer: Any, size: int, eos: frozenset[int]) -> Vocabulary:
    """The vocabulary of a tokenizer (or of a processor that has one), made once.

    `size` is the width of the model's logits, `eos` the tokens that end a sequence. Raises
    ValueError for what is no tokenizer, and for one whose texts have tokens beyond `size`.
    """
    own = getattr(tokenizer, "tokenizer", tokenizer)
    if not callable(getattr(own, "get_vocab", None)):
        raise ValueError(
            f"tokenizer={type(tokenizer).__name__} is no tokenizer of transformers, and a grammar "
            "needs that of the model; give tokenizer=processor.tokenizer"
        )
    if not eos:
        raise ValueError(
            "the request has no eos_token_id, and a text ends with one where its grammar does; "
            "give eos_token_id="
        )
    return _read(own, len(own), size, eos)


@lru_cache(maxsize=8)
def _read(tokenizer: Any, count: int, size: int, eos: frozenset[int]) -> Vocabulary:
    """`count` is the length of the tokenizer: tokens may be added to one later."""
    llguidance = import_llguidance()
    special = set(tokenizer.all_special_ids)
    used = tokenizer.get_vocab().values()
    if foreign := sorted(id for id in used if id >= size and id not in special):
        raise ValueError(
            f"the tokenizer has token {foreign[0]} ({tokenizer.decode([foreign[0]])!r}), but the "
            f"model predicts {size} tokens; give the tokenizer of this model"
        )
    width, ends = max(size, count, max(used) + 1), sorted(eos)
    texts = _TokenTexts(tokenizer, width, ends[0])
    has_words = False
    try:
        from llguidance.hf import from_tokenizer

        made = from_tokenizer(tokenizer, n_vocab=width, eos_token=ends)
    except ValueError:  # not of bytes: words, or a tokenizer in Python
        has_words = True
        made = llguidance.LLTokenizer(llguidance.TokenizerWrapper(texts), eos_token=ends)
    return Vocabulary(made, size, has_words, texts.drops_space, eos)


class _TokenTexts:
    """Tokens as what they add to a text, as `llguidance.TokenizerWrapper` reads them.

    All bytes follow as further tokens: the library splits texts that it must write, and a
    vocabulary of words cannot write a part of one.
    """

    def __init__(self, tokenizer: Any, size: int, eos: int) -> None:
        self.tokenizer, self.eos_token_id, self.bos_token_id = tokenizer, eos, None
        self.special_token_ids = [id for id in tokenizer.all_special_ids if id < size]
        self.known = sorted(set(tokenizer.get_vocab().values()) - set(self.special_token_ids))
        self.size = size
        few = self.known[:64]
        self.drops_space = any(self._after(id) == f" {self._decode([id])}" for id in few)

    @cached_property
    def tokens(self) -> list[bytes]:
        """The bytes of every token; none for one that is not a text of its own."""
        found = [b""] * self.size
        for id in self.known:
            text = self._after(id)
            found[id] = b"" if UNKNOWN in text else text.encode()
        for id in self.special_token_ids:
            found[id] = str(self.tokenizer.convert_ids_to_tokens(id)).encode()
        return [*found, *(bytes([one]) for one in range(256))]

    def __call__(self, text: str | bytes) -> list[int]:
        """The ids of a text: the longest token at each place."""
        left = text.encode() if isinstance(text, str) else text
        ids = []
        while left:
            sizes = range(min(len(left), self._longest), 0, -1)
            size = next(size for size in sizes if left[:size] in self._ids)
            ids.append(self._ids[left[:size]])
            left = left[size:]
        return ids

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        every = [*enumerate(self.tokens)]  # a token of the model is preferred to a byte
        return {text: id for id, text in reversed(every) if text and id not in special}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids))

    def _after(self, id: int) -> str:
        """What a token adds to a text."""
        return self._decode([self.known[0], id])[len(self._decode([self.known[0]])) :]

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode([*ids], clean_up_tokenization_spaces=False)
        return text
