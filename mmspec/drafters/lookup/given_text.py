"""Drafting from a given text, such as the output of a faster model on the same page."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from transformers import AutoTokenizer

from mmspec import _hf
from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.drafters.lengths.length import Length
from mmspec.drafters.lookup.prompt_lookup import length_of, pad_chains
from mmspec.drafters.lookup.text_index import copy_tokens
from mmspec.errors import explain_load_errors, format_value
from mmspec.recipe import Kit
from mmspec.targets.tokens.context import Context

DRAFT = "draft"  # key of `drafter_inputs`


class GivenText(Drafter):
    """Copies a text given with the call, from where the last `window` tokens occur in it.

    `drafter_inputs={"draft": ...}` is a text or a list of token ids per row; `default` is the text
    of every row in calls without one. A row without a text (None, empty) is decoded plainly, and so
    are positions that match nowhere. The copy continues as long as the target agrees. After a
    mismatch it resumes where the last tokens occur in the text, at the next of several matches;
    where only the characters match but not the tokens, the rest of the text is tokenized again from
    there. Tokens in `ignore` (image placeholders) end a copy.
    """

    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET,)

    def __init__(
        self,
        length: Length,
        vocabulary: int,
        window: int = 3,
        tokenizer: Any = None,
        ends: Collection[int] = (),
        ignore: Collection[int] = (),
        default: str | None = None,
    ) -> None:
        if window < 1:
            raise ValueError(f"window={window} leaves nothing to match; give 1 or more tokens")
        self.length, self.vocabulary = length, vocabulary
        self.window, self.tokenizer = window, tokenizer
        self.ends, self.ignore = sorted(ends), frozenset(ignore)
        self.default = self._read(default)

    def prepare_inputs(self, inputs: Mapping[str, Any], batch: int) -> Mapping[str, Any]:
        """Return one `DraftText` per row.

        Raises ValueError for other inputs, for a number of rows that is not the request's, for text
        without a tokenizer, and for values that are neither text nor ids.
        """
        unknown = sorted(set(inputs) - {DRAFT})
        if unknown:
            raise ValueError(
                f"drafter_inputs has {', '.join(unknown)}, but this recipe drafts from a text "
                f"alone; give drafter_inputs={{{DRAFT!r}: [...]}}"
            )
        rows = inputs.get(DRAFT)
        if rows is None:
            return {DRAFT: [self.default] * batch}
        rows = [rows] if isinstance(rows, str) else list(rows)
        if len(rows) != batch:
            raise ValueError(
                f"drafter_inputs has {len(rows)} drafts for {batch} requests; give one for each, "
                "None where there is none"
            )
        return {DRAFT: [self._read(row) for row in rows]}

    def _read(self, row: Any) -> DraftText:
        if row is None:
            return DraftText([])
        if isinstance(row, str):
            return DraftText(self.tokens(row, whole=True), row) if row.strip() else DraftText([])
        ids = row.tolist() if isinstance(row, Tensor) else list(row)
        if not all(type(one) is int and 0 <= one < self.vocabulary for one in ids):
            raise ValueError(
                f"a draft is a text or a list of token ids below {self.vocabulary}, not "
                f"{row!s:.60}; give one of these"
            )
        return DraftText(ids)

    def tokens(self, text: str, whole: bool = False) -> list[int]:
        """Tokenize a text for the target; a `whole` text gets its end token. Raises ValueError."""
        if self.tokenizer is None:
            raise ValueError(
                "the draft is a text, and the target's tokenizer was not found beside its weights; "
                "give processor= to accelerate, or drafts of token ids"
            )
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        ids = [one for one in ids if one < self.vocabulary]
        return [*ids, *self.ends[:1]] if whole else ids

    def begin(self, context: Context) -> _GivenTextState:
        drafts = context.request.drafter_inputs.get(DRAFT) or [DraftText([])] * context.batch
        return _GivenTextState(self.length.begin(), [_TextPosition(draft) for draft in drafts])

    def propose(self, context: Context, state: _GivenTextState) -> Draft:
        budget = self.length.budget(state.length, context)
        copies: list[list[int]] = []
        for row, (place, emitted) in enumerate(
            zip(state.rows, context.generated_tokens(), strict=True)
        ):
            is_drafted = budget and not context.finished[row] and bool(place.draft.tokens)
            at = self._find_position(place, emitted) if is_drafted else None
            tokens = place.draft.tokens
            length = 0 if at is None else min(budget, len(tokens) - at)
            copies.append(copy_tokens(tokens, at, length, self.ignore))
        return pad_chains(context, copies)

    def _find_position(self, place: _TextPosition, tokens: Sequence[int]) -> int | None:
        """Position in the text after the emitted tokens, if they match."""
        at = place.follow(tokens)
        if at is None:
            at = place.match_suffix(tokens[-self.window :])
        if at is None and place.draft.text is not None:
            at = self._retokenise(place, tokens[-self.window :])
        place.at, place.read = at, len(tokens)
        return at

    def _retokenise(self, place: _TextPosition, last: Sequence[int]) -> int | None:
        """Tokenize the text again from where the characters of the `last` tokens occur in it."""
        text = place.draft.text
        tail = self.tokenizer.decode(list(last))
        if text is None or not tail.strip() or "\ufffd" in tail:
            return None
        start = text.find(tail, place.characters)
        start = text.find(tail) if start < 0 else start
        before = self.tokens(tail)
        rest = [] if start < 0 else self.tokens(text[start:], whole=True)
        if start < 0 or rest[: len(before)] != before:
            return None
        place.draft, place.characters = DraftText(rest, text), start
        return len(before)

    def observe(
        self, context: Context, state: _GivenTextState, draft: Draft, scores: Scores, round_: Round
    ) -> _GivenTextState:
        state.length = self.length.observe(state.length, round_)
        return state


@dataclass(frozen=True)
class DraftText:
    """A text in tokens, and the string if it was given as one."""

    tokens: list[int]
    text: str | None = None


@dataclass
class _TextPosition:
    """The position reached in a row's text."""

    draft: DraftText
    at: int | None = 0  # index of the next token, if known
    read: int = 0  # emitted tokens already compared
    last: int = 0  # last known position
    characters: int = 0  # offset of the tokens in the string
    places: dict[int, dict[tuple[int, ...], list[int]]] = field(default_factory=dict)

    def follow(self, tokens: Sequence[int]) -> int | None:
        """Continue from the last position, if the new tokens are those of the text."""
        if self.at is None:
            return None
        self.last = self.at
        end = self.at + len(tokens) - self.read
        return end if self.draft.tokens[self.at : end] == list(tokens[self.read :]) else None

    def match_suffix(self, last: Sequence[int]) -> int | None:
        """Position after the same tokens elsewhere: the next one, else the last one before."""
        size = len(last)
        if not size:
            return None
        if size not in self.places:
            index: dict[tuple[int, ...], list[int]] = {}
            for end in range(size, len(self.draft.tokens) + 1):
                index.setdefault(tuple(self.draft.tokens[end - size : end]), []).append(end)
            self.places[size] = index
        found = self.places[size].get(tuple(last))
        if not found:
            return None
        return next((end for end in found if end > self.last), found[-1])


@dataclass
class _GivenTextState:
    """The state of a request."""

    length: Any
    rows: list[_TextPosition]


def given_text(kit: Kit) -> Drafter:
    """Drafts from a text given with the call."""
    model = _hf.unwrap_compiled(kit.target.model)
    ends = _hf.eos_ids(model.generation_config) if model.can_generate() else ()
    tokenizer = find_tokenizer(kit)
    file, default = kit.options["draft_file"], None
    if file is not None:
        if not isinstance(file, str | Path) or not Path(file).is_file():
            raise ValueError(f"draft_file={format_value(file)} does not exist; give a text file")
        default = Path(file).read_text(encoding="utf-8")
    arguments = (
        kit.target.vocabulary,
        kit.options["window"],
        tokenizer,
        ends,
        kit.target.visual_ids,
        default,
    )
    return GivenText(length_of(kit), *arguments)


def find_tokenizer(kit: Kit) -> Any:
    """The tokenizer of the option `processor`, or the one in the target's folder; None = neither.

    Raises ValueError for another option.
    """
    given = kit.options["processor"]
    source = str(_hf.unwrap_compiled(kit.target.model).config._name_or_path or "")
    if given is not None:
        if not callable(given):
            raise ValueError(
                f"processor={format_value(given)} has no tokenizer; give the model's own, from "
                "AutoProcessor or AutoTokenizer"
            )
        return getattr(given, "tokenizer", given)
    if not (Path(source) / "tokenizer_config.json").is_file():
        return None
    with explain_load_errors(source, "tokenizer"):
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
