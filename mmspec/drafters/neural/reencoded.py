"""Drafting with a model of any vocabulary: its text is encoded with the target's tokenizer.

Universal assisted decoding (Timor et al. 2025, "string-level exact match"; `assistant_tokenizer=`
of transformers). The draft model continues the text greedily, and the continuation is a proposal
like copied text: exact with every rule for such drafts, whatever the tokenizers make of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.drafters.draft_model import DraftNodes, chain_layout
from mmspec.drafters.lengths.length import Length
from mmspec.drafters.lookup.prompt_lookup import length_of, pad_chains
from mmspec.drafters.neural.draft_inputs import check_token_prompts
from mmspec.drafters.neural.shared_tokens import AnyVocabularyKind, pad_prompts
from mmspec.models.translation import WINDOW, OtherVocabulary, Translation, find_tokenizers
from mmspec.recipe import Kit
from mmspec.targets.memory import Memory, RowMemories, build_block
from mmspec.targets.readers.reader import Reader
from mmspec.targets.rows import drop_row, join_memories, swap_out
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True, eq=False)
class TranslatedReader:
    """The reader of a draft model, and the translation of its tokens."""

    backbone: Reader
    translation: Translation

    def compile_blocks(self, make_graphs: Callable[..., Any]) -> str:
        return self.backbone.compile_blocks(make_graphs)


@dataclass(frozen=True, eq=False)
class Reencoded(Drafter):
    """Proposes the target's tokens of a text that a draft model writes, `length` tokens long."""

    source: TranslatedReader
    length: Length
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET,)
    reads_prompt: ClassVar[bool] = True

    def begin(self, context: Context) -> _State:
        own = self.source
        rows = [own.translation.read_prompt(row) for row in context.history]
        memory, _, _ = own.backbone.prefill(
            pad_prompts(rows, own.backbone.device),
            extra_slots=2 * context.request.max_new_tokens + 64,
        )
        own.backbone.prepare_graphs(memory, 2 * context.request.max_new_tokens)
        texts = [_Text() for _ in rows]
        return _State(self.length.begin(), memory, rows, [len(row) for row in rows], texts)

    def propose(self, context: Context, state: _State) -> Draft:
        budget = self.length.budget(state.length, context)
        if not budget:
            return context.empty_draft()
        generated = context.generated_tokens()
        self._read_new(generated, state)
        drafted = self._write(state, budget)
        found: list[list[int]] = [[] for _ in drafted]
        for row, (text, new) in enumerate(zip(state.texts, drafted, strict=True)):
            if not context.finished[row]:
                window = generated[row][-WINDOW:]
                made = self.source.translation.continue_with(window, text.tail, new)
                found[row] = made[:budget]
        return pad_chains(context, found)

    def observe(
        self, context: Context, state: _State, draft: Draft, scores: Scores, round_: Round
    ) -> _State:
        state.length = self.length.observe(state.length, round_)
        return state

    def cache_bytes(self, state: _State) -> int:
        memory = state.memory
        rows = memory.rows if isinstance(memory, RowMemories) else [memory]
        return sum(row.cache.bytes(max(row.lengths)) for row in rows)

    def _read_new(self, generated: Sequence[Sequence[int]], state: _State) -> None:
        """Bring the cache to the committed text.

        What was cached is kept as far as it is how the text is encoded now.
        """
        waiting, steps = [], []
        for row, new in enumerate(generated):
            text, cached = state.texts[row], state.cached[row]
            text.encode(self.source.translation, new)
            wanted = [*cached[: state.prompt[row]], *text.ids]
            same = _count_same(cached, wanted)
            same = min(same, len(wanted) - 1)
            steps.append(same - len(cached))
            waiting.append(wanted[same:])
            state.cached[row] = wanted
        if any(steps):
            state.memory.advance(steps)
        block = build_block(waiting, None, state.memory.like)
        logits, _ = self.source.backbone.read(state.memory, block)
        state.memory.advance([len(row) for row in waiting])
        state.next = logits[:, -1:].argmax(-1)

    def _write(self, state: _State, budget: int) -> list[list[int]]:
        """Draft tokens per row, read from the device once; all but the last one are cached."""
        token, made = state.next, []
        for step in range(budget):
            made.append(token)
            if step < budget - 1:
                block = DraftNodes(token, chain_layout(step, token.device)).block(state.memory.like)
                logits, _ = self.source.backbone.read(state.memory, block)
                token = logits[:, -1:].argmax(-1)
        rows: list[list[int]] = torch.cat(made, 1).tolist()
        paths = (tuple(range(budget - 1)),) * len(rows)
        state.memory.commit([0] * len(rows), paths, budget - 1)
        for cached, row in zip(state.cached, rows, strict=True):
            cached += row[:-1]
        return rows


@dataclass
class _Text:
    """The generated text of a row in draft ids.

    Only its end is encoded again: what is before a place where the text may be divided, found every
    few tokens, stays as it was encoded.
    """

    ids: list[int] = field(default_factory=list)  # of all of it
    tail: list[int] = field(default_factory=list)  # of its last `WINDOW` target tokens
    count: int = 0  # target tokens in `ids`
    start: int = 0  # of the end: target tokens before it
    before: list[int] = field(default_factory=list)  # draft ids before it
    next_division: int = 4 * WINDOW  # target tokens at which a later start is looked for

    def encode(self, translation: Translation, new: Sequence[int]) -> None:
        """Encode the generated tokens, unless there are no more than before."""
        if len(new) <= self.count:
            return
        end = translation.encode(new[self.start :])
        self.count, self.ids = len(new), [*self.before, *end]
        is_short = len(new) <= WINDOW
        self.tail = self.ids if is_short else translation.encode(new[-WINDOW:])
        if len(new) >= self.next_division:
            self._divide(translation, new, end)
            self.next_division = len(new) + 2 * WINDOW

    def _divide(self, translation: Translation, new: Sequence[int], end: list[int]) -> None:
        """Move the start to where both parts are encoded as the whole is, if there is one."""
        last = len(new) - 2 * WINDOW
        for start in range(last, max(last - 8, self.start), -1):
            first = translation.encode(new[self.start : start])
            if [*first, *translation.encode(new[start:])] == end:
                self.start, self.before = start, [*self.before, *first]
                return


@dataclass
class _State:
    """The draft model's cache, and the draft ids in it."""

    length: Any
    memory: Memory | RowMemories
    cached: list[list[int]]  # per row, prompt included
    prompt: list[int]  # number of them in the prompt
    texts: list[_Text]  # per row
    next: Any = field(default=None)  # (B, 1) the first drafted token

    def join(self, other: _State) -> None:
        """Append the rows of another request; the draft length stays that of the batch."""
        self.memory = join_memories(self.memory, other.memory)
        self.cached += other.cached
        self.prompt += other.prompt
        self.texts += other.texts

    def drop(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        drop_row(self.memory, row)
        swap_out(self.cached, row)
        swap_out(self.prompt, row)
        swap_out(self.texts, row)


def _count_same(one: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


@dataclass(frozen=True)
class ReencodedKind(AnyVocabularyKind):
    """Draft models of any vocabulary, with both tokenizers."""

    def read(self, model: Any, target: Reader, sees: str) -> Any:
        """Raises ValueError for vocabularies that differ without their tokenizers."""
        if not isinstance(model, OtherVocabulary):
            found = find_tokenizers(target.model, model)
            reader = target.make_reader(model)
            if found is None and reader.vocabulary != target.vocabulary:
                raise ValueError(
                    f"the draft model has {reader.vocabulary} tokens, the target "
                    f"{target.vocabulary}, and their tokenizers are not known; give drafter="
                    "mmspec.models.translation.OtherVocabulary(model, tokenizer, target_tokenizer)"
                )
            hidden = frozenset(target.visual_ids)
            if found is None:
                return TranslatedReader(reader, Translation(None, None, hidden))
            model = found
        reader = target.make_reader(model.model)
        return TranslatedReader(reader, Translation.of(model, target.visual_ids))

    def save(self, model: Any, folder: Path, target: Any, drafter: Any) -> None:
        model.save_pretrained(folder)
        if drafter.source.translation.draft is not None:
            drafter.source.translation.draft.save_pretrained(folder)


REENCODED = ReencodedKind()


def reencoded(kit: Kit) -> Drafter:
    """Text of a draft model in the target's tokens.

    Raises ValueError for prompts that are not of the target's vocabulary.
    """
    check_token_prompts(kit.target, "uad encodes the text again")
    assert isinstance(kit.drafter, TranslatedReader)
    return Reencoded(kit.drafter, length_of(kit))
