"""A text from outside is the draft: what a quicker reader of the same page made of it."""

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
from mmspec.drafters.lookup.prompt_lookup import copy, length_of, ragged
from mmspec.recipe import Kit
from mmspec.targets.tokens.context import Context

DRAFT = "draft"  # in drafter_inputs


class GivenText(Drafter):
    """Copies a text that came with the call, from where the last `window` tokens stand in it.

    `drafter_inputs={"draft": ...}` is a text per row, or token ids; where a call gives none it is
    `usual`, for every row. A row without one (None, empty) is decoded plainly, and so is what
    stands nowhere in the text. The text is read on as long as
    the target says the same. Behind a difference it is taken up again where the last tokens stand
    in it, of several places at the next one; where only the words agree but not their tokens, the
    rest of the text is cut into tokens anew. Tokens in `ignore` (image placeholders) end a copy.
    """

    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET,)

    def __init__(
        self,
        length: Length,
        vocabulary: int,
        window: int = 3,
        words: Any = None,
        ends: Collection[int] = (),
        ignore: Collection[int] = (),
        usual: str | None = None,
    ) -> None:
        if window < 1:
            raise ValueError(f"window={window} leaves nothing to match; give 1 or more tokens")
        self.length, self.vocabulary = length, vocabulary
        self.window, self.words = window, words
        self.ends, self.ignore = sorted(ends), frozenset(ignore)
        self.usual = self._read(usual)

    def given(self, inputs: Mapping[str, Any], batch: int) -> Mapping[str, Any]:
        """The texts as a `DraftText` per row.

        Raises ValueError for other inputs, for more or fewer rows than the request has, for text
        without a tokenizer, and for what is neither text nor ids.
        """
        unknown = sorted(set(inputs) - {DRAFT})
        if unknown:
            raise ValueError(
                f"drafter_inputs has {', '.join(unknown)}, but this recipe drafts from a text "
                f"alone; give drafter_inputs={{{DRAFT!r}: [...]}}"
            )
        rows = inputs.get(DRAFT)
        if rows is None:
            return {DRAFT: [self.usual] * batch}
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
        """A text in the target's tokens; a `whole` one with its end. Raises ValueError."""
        if self.words is None:
            raise ValueError(
                "the draft is a text, and the target's tokenizer was not found beside its weights; "
                "give processor= to accelerate, or drafts of token ids"
            )
        ids = self.words(text, add_special_tokens=False).input_ids
        ids = [one for one in ids if one < self.vocabulary]
        return [*ids, *self.ends[:1]] if whole else ids

    def begin(self, context: Context) -> _TextLeft:
        drafts = context.request.drafter_inputs.get(DRAFT) or [DraftText([])] * context.batch
        return _TextLeft(self.length.begin(), [_Place(draft) for draft in drafts])

    def propose(self, context: Context, state: _TextLeft) -> Draft:
        budget = self.length.budget(state.length, context)
        copies: list[list[int]] = []
        for row, (place, said) in enumerate(zip(state.rows, context.emitted(), strict=True)):
            wanted = budget and not context.finished[row] and bool(place.draft.tokens)
            at = self._found(place, said) if wanted else None
            tokens = place.draft.tokens
            room = 0 if at is None else min(budget, len(tokens) - at)
            copies.append(copy(tokens, at, room, self.ignore))
        return ragged(context, copies)

    def _found(self, place: _Place, said: Sequence[int]) -> int | None:
        """Where the text goes on behind `said`, if it does."""
        at = place.on(said)
        if at is None:
            at = place.again(said[-self.window :])
        if at is None and place.draft.text is not None:
            at = self._retokenised(place, said[-self.window :])
        place.at, place.read = at, len(said)
        return at

    def _retokenised(self, place: _Place, last: Sequence[int]) -> int | None:
        """Cut the text anew behind the words of the `last` tokens, where they stand in it."""
        text = place.draft.text
        tail = self.words.decode(list(last))
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
        self, context: Context, state: _TextLeft, draft: Draft, scores: Scores, kept: Round
    ) -> _TextLeft:
        state.length = self.length.observe(state.length, kept)
        return state


@dataclass(frozen=True)
class DraftText:
    """A text in tokens; itself too, where it was given as text."""

    tokens: list[int]
    text: str | None = None


@dataclass
class _Place:
    """How far a row's text was followed."""

    draft: DraftText
    at: int | None = 0  # what comes next, if that is known
    read: int = 0  # tokens of the answer that were compared
    last: int = 0  # where the text was left
    characters: int = 0  # in front of the tokens
    places: dict[int, dict[tuple[int, ...], list[int]]] = field(default_factory=dict)

    def on(self, said: Sequence[int]) -> int | None:
        """Straight on: the new tokens of the answer are the text's own."""
        if self.at is None:
            return None
        self.last = self.at
        end = self.at + len(said) - self.read
        return end if self.draft.tokens[self.at : end] == list(said[self.read :]) else None

    def again(self, last: Sequence[int]) -> int | None:
        """Behind the same tokens elsewhere: at the next such place, else the last one before."""
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
class _TextLeft:
    """What is remembered of a request."""

    length: Any
    rows: list[_Place]


def given_text(kit: Kit) -> Drafter:
    """A text that comes with the call."""
    model = _hf.uncompiled(kit.target.model)
    ends = _hf.eos_ids(model.generation_config) if model.can_generate() else ()
    words = _words(kit.options["processor"], str(model.config._name_or_path or ""))
    file, usual = kit.options["draft_file"], None
    if file is not None:
        if not Path(file).is_file():
            raise ValueError(f"there is no {file}; give draft_file= a file of text")
        usual = Path(file).read_text(encoding="utf-8")
    how = (kit.target.vocabulary, kit.options["window"], words, ends, kit.target.visual_ids, usual)
    return GivenText(length_of(kit), *how)


def _words(given: Any, source: str) -> Any:
    """The tokenizer given, a processor's, or the one in the target's folder."""
    if given is not None:
        return vars(given).get("tokenizer", given)
    if not (Path(source) / "tokenizer_config.json").is_file():
        return None
    return AutoTokenizer.from_pretrained(source)
