"""Drafting with a model of another vocabulary, from the tokens that both have.

Token-level intersection (Timor et al. 2025, "Accelerating LLM inference with lossless speculative
decoding algorithms for heterogeneous vocabularies", algorithm 4): q is the draft model's
distribution, normalised on the shared tokens, in target ids. Exact with every exact rule, as q is
the distribution that is drawn from. Committed tokens that the draft model lacks are read as what
its tokenizer makes of their text.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmspec._attributes import default_property
from mmspec.distributions.categorical import Categorical
from mmspec.drafters.draft_model import (
    DraftModel,
    DraftNodes,
    DraftUpdate,
    committed_prefix,
    draft_distribution,
)
from mmspec.drafters.neural.small_model import Autoregressive, SmallModelKind
from mmspec.models.compatibility import check_same_size
from mmspec.models.translation import OtherVocabulary, Translation, find_tokenizers
from mmspec.targets.memory import Memory, RowMemories, build_block
from mmspec.targets.readers.reader import Reader
from mmspec.targets.rows import drop_row, join_memories, swap_out
from mmspec.targets.tokens.context import Context

log = logging.getLogger("mmspec")
MIN_SHARE = 0.05  # of draft tokens that are shared


@dataclass(frozen=True, eq=False)
class SharedTokens(DraftModel):
    """A draft model that proposes the tokens of its vocabulary that the target has."""

    backbone: Reader
    translation: Translation
    vocabulary: int  # the target's

    @property
    def sees(self) -> str:
        return "nothing"

    @default_property
    def reads_prompt(self) -> bool:
        return True

    @property
    def device(self) -> torch.device:
        """Where the draft model computes."""
        return self.backbone.device

    @cached_property
    def pairs(self) -> tuple[Tensor, Tensor]:  # (S,) each
        """Shared tokens: target ids, and draft ids. One draft token stands for one target token."""
        size = self.backbone.vocabulary
        chosen: dict[int, int] = {}
        for own, other in self.translation.shared.items():
            if own < self.vocabulary and other < size:
                chosen.setdefault(other, own)
        ids = [*chosen.values()], [*chosen]
        ours, theirs = (torch.tensor(one, device=self.device) for one in ids)
        return ours, theirs

    @cached_property
    def table(self) -> Tensor:  # (V,)
        """The draft id of every target id; 0 where it is not shared."""
        own, other = self.pairs
        made = torch.zeros(self.vocabulary, dtype=torch.int64, device=self.device)
        return made.scatter(0, own, other)

    def begin(self, context: Context) -> _State:
        rows = [self.translation.read_prompt(row) for row in context.history]
        memory, _, _ = self.backbone.prefill(
            pad_prompts(rows, self.device), extra_slots=2 * context.request.max_new_tokens + 64
        )
        return _State(memory, list(context.prompt), [row[-1] for row in rows])

    def predict_first(self, context: Context, state: _State) -> Categorical:
        waiting, again = [], []
        for row, line in enumerate(context.history):
            new = self.translation.translate(line[state.read[row] :])
            again.append(0 if new else -1)  # nothing new: its last token is read again
            waiting.append(new or [state.last[row]])
        if any(again):
            state.memory.advance(again)
        block = build_block(waiting, None, state.memory.like)
        logits, _ = self.backbone.read(state.memory, block)
        state.memory.advance([len(row) for row in waiting])
        state.read = [len(row) for row in context.history]
        state.last = [row[-1] for row in waiting]
        return draft_distribution(context, self._spread(logits), committed_prefix(context))

    def predict(self, context: Context, state: _State, nodes: DraftNodes) -> Categorical:
        own = replace(nodes, tokens=self.table[nodes.tokens.to(self.device)])
        logits, _ = self.backbone.read(state.memory, own.block(state.memory.like))
        found = self._spread(logits)
        return draft_distribution(context, found, nodes.prefix(context), nodes.layout.depths + 1)

    def keep(self, context: Context, state: _State, update: DraftUpdate) -> _State:
        counts = state.memory.commit([0] * context.batch, update.read, update.nodes_read)
        for row, count in enumerate(counts[: context.batch]):
            state.read[row] += count
            if count:
                line = context.history[row]
                state.last[row] = self.translation.shared.get(line[state.read[row] - 1], 0)
        return state

    def cache_bytes(self, state: _State) -> int:
        memory = state.memory
        rows = memory.rows if isinstance(memory, RowMemories) else [memory]
        return sum(row.cache.bytes(max(row.lengths)) for row in rows)

    def _spread(self, logits: Tensor) -> Tensor:  # (B, n, V') -> (B, n, V)
        own, other = self.pairs
        made = logits.new_full((*logits.shape[:2], self.vocabulary), -torch.inf)
        made[..., own] = logits[..., other]
        return made


@dataclass
class _State:
    """The draft model's cache, the committed target tokens in it, and the last draft token."""

    memory: Memory | RowMemories
    read: list[int]
    last: list[int]

    def join(self, other: _State) -> None:
        """Append the rows of another request."""
        self.memory = join_memories(self.memory, other.memory)
        self.read += other.read
        self.last += other.last

    def drop(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        drop_row(self.memory, row)
        swap_out(self.read, row)
        swap_out(self.last, row)


def pad_prompts(rows: Sequence[Sequence[int]], device: torch.device) -> dict[str, Any]:
    """Inputs (B, L) of prompts of several lengths, padded on the left."""
    width = max(map(len, rows))
    ids = [[0] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    made = {"input_ids": ids, "attention_mask": mask}
    return {name: torch.tensor(value, device=device) for name, value in made.items()}


@dataclass(frozen=True)
class AnyVocabularyKind(SmallModelKind):
    """Whole models that predict the target's tokens, or tokens of which some are the target's.

    Those of another tokenizer are an `OtherVocabulary`, or were loaded from a folder with one, as
    was the target.
    """

    def accepts(self, model: Any) -> bool:
        return isinstance(model, OtherVocabulary) or super().accepts(model)

    def unwrap(self, model: Any) -> Any:
        return model.model if isinstance(model, OtherVocabulary) else model

    def default_sees(self, model: Any, target: Reader, requested: str) -> str:
        if not isinstance(model, OtherVocabulary):
            return super().default_sees(model, target, requested)
        if requested not in ("auto", "nothing"):
            raise ValueError(
                f"sees={requested!r} does not fit: a draft model of another vocabulary reads text "
                "only; drop sees="
            )
        return "nothing"

    def read(self, model: Any, target: Reader, sees: str) -> Any:
        """Raises ValueError where too few tokens are shared, or tokenizers are not known."""
        if isinstance(model, OtherVocabulary):
            return share_tokens(model, target)
        found = find_tokenizers(target.model, model) if target.family.writes_text else None
        if found is not None and found.differs:
            return share_tokens(found, target)
        return super().read(model, target, sees)

    def save(self, model: Any, folder: Path, target: Any, drafter: Any) -> None:
        super().save(model, folder, target, drafter)
        source = drafter.model if isinstance(drafter, Autoregressive) else None
        if isinstance(source, SharedTokens):
            source.translation.draft.save_pretrained(folder)


ANY_VOCABULARY = AnyVocabularyKind(check=check_same_size)


def share_tokens(source: OtherVocabulary, target: Reader) -> SharedTokens:
    """Bind a draft model of another vocabulary. Raises ValueError where too little is shared."""
    reader = target.make_reader(source.model)
    translation = Translation.of(source, target.visual_ids)
    share = translation.share
    names = [type(one.model).__name__ for one in (target, reader)]
    if share < MIN_SHARE:
        raise ValueError(
            f"the tokenizer of the draft model ({names[1]}) shares {share:.1%} of its tokens with "
            f"that of the target ({names[0]}), too few to draft from; use recipe='uad', which "
            "encodes the drafted text again"
        )
    log.warning(
        "the tokenizers differ: %s drafts for %s from the %.0f %% of its tokens that are shared; "
        "recipe='uad' encodes its text again instead",
        *reversed(names),
        100 * share,
    )
    return SharedTokens(reader, translation, target.vocabulary)
