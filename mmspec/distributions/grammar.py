"""Output that follows a grammar: JSON schemas, regular expressions and context-free grammars.

The grammar's matcher (llguidance, extra `[grammar]`) gives the tokens that may follow a text. Every
node of a draft gets the mask of its own path, so a constrained distribution is that of plain
constrained decoding, and every recipe keeps what it promises of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmspec.distributions.call_state import RequestProcessor, StatefulProcessor
from mmspec.distributions.vocabulary import Vocabulary, import_llguidance, read_vocabulary
from mmspec.errors import format_value


@dataclass(frozen=True)
class Grammar(RequestProcessor):
    """What a generated text must be; made by `json_schema`, `regex` or `ebnf`.

        fast.generate(**inputs, grammar=mmspec.Grammar.json_schema(schema), tokenizer=tokenizer)

    An output that ends before `max_new_tokens` is a whole text of the grammar. The grammar is
    compiled once per vocabulary. `constrains_drafts=False` leaves draft distributions as they are:
    an accelerator is then read once a round instead of once per level of a draft, and fewer drafted
    tokens are accepted. `tokenizer` is that of the model, or its processor; `generate` takes one as
    well.
    """

    source: str  # of llguidance: {"grammars": [...]}
    tokenizer: Any = field(default=None, compare=False)
    constrains_drafts: bool = True

    def __post_init__(self) -> None:
        _check_source(self.source)

    @classmethod
    def json_schema(
        cls, schema: Mapping[str, Any] | str | bool, *, whitespace: bool = True, **options: Any
    ) -> Grammar:
        """JSON values of a schema, a mapping or JSON text; {"type": "object"} is any JSON object.

        Without `whitespace` there is none between tokens of JSON; with it at most 40 characters,
        as small models may write it endlessly. Raises ValueError for what is not JSON, and for
        keywords that the library does not support.
        """
        import_llguidance()
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema)
            parsed = json.loads(text)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the schema {format_value(schema)} is not JSON ({error}); give a JSON schema, "
                'such as {"type": "object"}'
            ) from error
        if isinstance(parsed, dict):
            how = (
                {"whitespace_pattern": WHITESPACE} if whitespace else {"whitespace_flexible": False}
            )
            parsed = {"x-guidance": how, **parsed}
        return cls(json.dumps({"grammars": [{"json_schema": parsed}]}), **options)

    @classmethod
    def regex(cls, pattern: str, **options: Any) -> Grammar:
        """Texts that a regular expression matches as a whole; without look-around."""
        source = import_llguidance().LLMatcher.grammar_from_regex(_check_text("pattern", pattern))
        return cls(source, **options)

    @classmethod
    def ebnf(cls, text: str, **options: Any) -> Grammar:
        """Texts of a context-free grammar: rules in Lark's notation, or in GBNF (llama.cpp's).

        The first is `start: "yes" | "no"`, the second `root ::= "yes" | "no"`.
        """
        own = import_llguidance()
        try:
            lark = own.gbnf_to_lark.any_to_lark(_check_text("text", text))
        except Exception as error:  # of its parser, in classes of its own
            raise ValueError(f"the grammar cannot be read: {error}") from error
        return cls(json.dumps({"grammars": [{"lark_grammar": lark}]}), **options)

    def bind(
        self, rows: Sequence[Grammar | None], size: int, eos: frozenset[int], tokenizer: Any = None
    ) -> GrammarProcessor:
        """The logits processor of a request.

        Raises ValueError for a tokenizer that does not fit.
        """
        made = GrammarProcessor([_compile_row(one, size, eos, tokenizer) for one in rows])
        made.masks_drafts = all(one.constrains_drafts for one in rows if one is not None)
        return made


def _compile_row(
    grammar: Grammar | None, size: int, eos: frozenset[int], tokenizer: Any
) -> GrammarState | None:
    if grammar is None:
        return None
    own = tokenizer if grammar.tokenizer is None else grammar.tokenizer
    if own is None:
        raise ValueError(
            "grammar= needs the model's tokenizer; give tokenizer=processor.tokenizer to "
            "generate(), or to the Grammar"
        )
    return _compile(grammar.source, read_vocabulary(own, size, eos))


@lru_cache(maxsize=64)
def _compile(source: str, vocabulary: Vocabulary) -> GrammarState:
    """The state before the first token of a grammar."""
    if vocabulary.drops_space:
        source = _allow_space(source)
    matcher = import_llguidance().LLMatcher(vocabulary.tokens, source, log_level=0)
    if matcher.is_error():
        raise ValueError(f"the grammar cannot be used: {_first_lines(matcher.get_error())}")
    state = GrammarState(matcher, vocabulary)
    state.check()
    return state


def _allow_space(source: str) -> str:
    """A grammar whose text may begin with a space, which its tokenizer drops."""
    first, *others = json.loads(source)["grammars"]
    start = {"lark_grammar": 'start: " "? @text'}
    return json.dumps({"grammars": [start, {**first, "name": "text"}, *others]})


@dataclass
class GrammarState:
    """A matcher after some tokens; it is never changed, but copied."""

    matcher: Any  # `llguidance.LLMatcher`
    vocabulary: Vocabulary
    text: tuple[int, ...] = ()  # the last tokens, for messages
    is_ended: bool = False
    known: np.ndarray[Any, Any] | None = None  # `allowed`, once computed

    def copy(self) -> GrammarState:
        """The same state for another request, which may run in another thread."""
        return replace(self, matcher=self.matcher.deep_copy())

    def advance(self, token: int) -> GrammarState | None:
        """The state after a token; None if it must not follow."""
        if self.is_ended:
            return self
        text = (*self.text[-15:], token)
        if token in self.vocabulary.eos:
            ended = GrammarState(self.matcher, self.vocabulary, text, is_ended=True)
            return ended if self.matcher.is_accepting() else None
        follower = self.matcher.deep_copy()
        if follower.try_consume_tokens([token]) != 1:
            return None
        return GrammarState(follower, self.vocabulary, text)

    def allowed(self) -> np.ndarray[Any, Any]:  # (V,) uint8
        """1 for the tokens that may follow; none at a dead end.

        Tokens of whole words that lead to a dead end, such as "on" for "one", may not follow.
        """
        if self.known is None:
            self.known = self._match()
            if self.vocabulary.has_words:
                for token in np.flatnonzero(self.known).tolist():
                    after = self.advance(token)
                    assert after is not None
                    self.known[token] = after.is_ended or after._match().any()
        return self.known

    def _match(self) -> np.ndarray[Any, Any]:  # (V,) uint8
        may_end, packed = self.matcher.is_accepting(), self.matcher.compute_bitmask()
        bits = np.frombuffer(packed, dtype=np.uint8)
        found = np.unpackbits(bits, count=self.vocabulary.size, bitorder="little")
        if self.matcher.is_stopped() and not may_end:  # the library then ends the text
            found[:] = 0
        return found

    def check(self) -> None:
        """Raises ValueError where no token may follow."""
        if self.is_ended or self.allowed().any():
            return
        shown = self.vocabulary.tokens.decode_str([*self.text])
        reason = self.matcher.stop_reason()
        limits = f" ({reason})" if "TooComplex" in reason else ""
        raise ValueError(
            f"the grammar allows no token of this vocabulary after {shown!r}{limits}; give a "
            "grammar whose texts its tokens can write"
        )


class GrammarProcessor(StatefulProcessor):
    """Gives tokens that the grammar of their row does not allow probability 0."""

    def __init__(self, rows: Sequence[GrammarState | None]) -> None:
        self.rows = rows

    def begin(self, row: int, prompt: Sequence[int]) -> Any:
        first = self.rows[row]
        return FREE if first is None else first.copy()

    def advance(self, state: Any, token: int) -> Any:
        return state if state is FREE else state.advance(token)

    def apply(self, states: Sequence[Any], scores: Tensor) -> Tensor:  # n, (n, V) -> (n, V)
        """Where nothing is left, all mass is on a token that the grammar does not allow.

        A draft may pass such a position; what is committed there is refused (`explain`).
        """
        allowed = np.ones(scores.shape, dtype=np.uint8)
        for place, state in enumerate(states):
            if state is not None and state is not FREE and not state.is_ended:
                allowed[place] = state.allowed()
        mask = torch.from_numpy(allowed).to(scores.device).bool()
        made = scores.masked_fill(~mask, -torch.inf)
        is_empty = made.amax(-1, keepdim=True) == -torch.inf
        barred = torch.zeros_like(made).masked_fill(mask, -torch.inf)
        first = torch.zeros_like(mask).scatter_(1, barred.argmax(-1, keepdim=True), True)
        return torch.where(is_empty, barred.masked_fill(~first, -torch.inf), made)

    def explain(self, state: Any, token: int) -> str:
        state.check()
        text = state.vocabulary.tokens.decode_str([*state.text])
        return (
            f"token {token} was taken after {text!r}, where the grammar does not allow it: other "
            "settings (min_new_tokens, bad_words_ids, ...) exclude all tokens that it allows, or "
            "the recipe accepts tokens of probability 0; loosen them, or choose an exact recipe"
        )


WHITESPACE = r"[ \n\t\r]{1,40}"
FREE = object()  # the state of a row without a grammar


def _check_source(source: Any) -> None:
    problem = import_llguidance().LLMatcher.validate_grammar(source)
    if problem and not problem.startswith("WARNING"):
        raise ValueError(
            f"the grammar is refused: {_first_lines(problem)}; change it to what llguidance "
            "supports (docs/grammar.md)"
        )


def _check_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}={format_value(value)} is not a text; give one")
    return value


def _first_lines(message: str) -> str:
    return " ".join(message.split("<state>")[0].split())[:300]
