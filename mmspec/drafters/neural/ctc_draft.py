"""A recogniser's encoder drafts what its language model is going to write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import torch

from mmspec.codes.ctc import Uncertainty, greedy, uncertainty
from mmspec.draft import Draft, Drafter, Kind
from mmspec.errors import first_line
from mmspec.recipe import LINEAR, Kit
from mmspec.targets.readers.ctc import Heard

Spelling = Callable[[Sequence[int]], list[int]]  # labels of the encoder -> tokens of the target


@dataclass(frozen=True)
class Spoken:
    """What was heard, row by row, in tokens of the target with its end."""

    tokens: list[list[int]]
    unsure: torch.Tensor  # (B,) nats; infinite where nothing was heard


class OfEncoder(Drafter):
    """Drafts what the CTC head of a recogniser's encoder heard, the first token included."""

    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET,)
    wants: ClassVar[frozenset[str]] = frozenset({"ctc"})
    opens: ClassVar[bool] = True
    sees: ClassVar[str] = "encoder"

    def heard(self, context: Any) -> Heard | None:
        """What the encoder heard, if anything. Raises ValueError for several sounds in a row."""
        heard: Heard | None = context.shared["ctc"]
        if heard is not None and len(heard.log_probs) != context.batch:
            raise ValueError(
                f"{len(heard.log_probs)} sounds in {context.batch} rows cannot be told apart; give "
                "one sound per row"
            )
        return heard


@dataclass(frozen=True)
class CtcDraft(OfEncoder):
    """The collapsed greedy path of the encoder's CTC head, all at once and once per request.

    It proposes the first token too, and the end of the text behind the last; what was refused is
    left to the target. A draft says how unsure the surest path was: the highest entropy of a frame.
    """

    spelling: Spelling
    end: int  # the token that ends a text

    def begin(self, context: Any) -> Spoken:
        """Spell what the encoder heard. Raises ValueError for several sounds in a row."""
        heard = self.heard(context)
        if heard is None:
            return Spoken(
                [[] for _ in range(context.batch)], torch.full((context.batch,), torch.inf)
            )
        paths = greedy(heard.log_probs, heard.seen, heard.blank)
        texts = [self.spelling([run.label for run in path]) for path in paths]
        unsure = uncertainty(heard.log_probs, heard.seen)
        empty = torch.tensor([not text for text in texts], device=unsure.device)
        room = context.request.room
        tokens = [[*text, self.end][:room] if text else [] for text in texts]
        return Spoken(tokens, unsure.masked_fill(empty, torch.inf))

    def propose(self, context: Any, state: Spoken) -> Draft:
        fresh = [
            not (context.generated(row) or context.finished[row]) for row in range(context.batch)
        ]
        rows = [text if new else [] for text, new in zip(state.tokens, fresh, strict=True)]
        width = max(map(len, rows))
        if not width:
            nothing: Draft = context.nothing()
            return nothing
        device = context.device
        mask = torch.tensor([[at < len(row) for at in range(width)] for row in rows], device=device)
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
        draft = Draft.chain(tokens, Kind.DET, mask=mask)
        return replace(draft, extras=Uncertainty(state.unsure))


@dataclass(frozen=True)
class WholeText:
    """A text is drafted at once, as long as it was heard to be."""

    words: ClassVar[str] = "whole text at once"
    walk: ClassVar[str] = LINEAR


def ctc_head(kit: Kit) -> Drafter:
    """The greedy path of the target's own CTC head, spelled in its tokens.

    Raises ValueError for a draft of another shape.
    """
    check_shape(kit)
    return CtcDraft(spelling(kit), end_of(kit))


def check_shape(kit: Kit) -> None:
    """Refuse a draft of another shape than a whole text. Raises ValueError."""
    if not isinstance(kit.shape, WholeText):
        raise ValueError("a CTC head drafts a text at once; drop length= and tree=")


def end_of(kit: Kit) -> int:
    """The token that ends a text. Raises ValueError where there is none."""
    ends = kit.target.model.generation_config.eos_token_id
    ends = kit.target.config.eos_token_id if ends is None else ends
    if ends is None:
        raise ValueError(
            f"{type(kit.target.model).__name__} has no eos_token_id, so no draft can say where a "
            "text ends; set it in model.generation_config"
        )
    return int(ends[0] if isinstance(ends, list | tuple) else ends)


def spelling(kit: Kit) -> Spelling:
    """How labels become tokens.

    A head of one label more than the target has tokens says those (label i is token i - 1); others
    say characters, label i being code point i, and their text is tokenized anew. Raises ValueError
    where there is no tokenizer to do so.
    """
    head = kit.target.family.ctc.head(kit.target.model)
    if head.out_features == kit.target.vocabulary + 1:
        return lambda labels: [label - 1 for label in labels]
    tokenizer = tokenizer_of(kit)

    def spelled(labels: Sequence[int]) -> list[int]:
        text = "".join(map(chr, labels)).strip()
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        return ids

    return spelled


def labels_of(kit: Kit) -> Callable[[int], Sequence[int]]:
    """The labels of the head that say a token; none for one that cannot be heard."""
    head = kit.target.family.ctc.head(kit.target.model)
    if head.out_features == kit.target.vocabulary + 1:
        return lambda token: (token + 1,)
    tokenizer = tokenizer_of(kit)
    marks = frozenset(tokenizer.all_special_ids)

    @cache
    def labels(token: int) -> tuple[int, ...]:
        points = () if token in marks else tuple(map(ord, tokenizer.decode([token])))
        return points if all(0 < point < head.out_features for point in points) else ()

    return labels


def tokenizer_of(kit: Kit) -> Any:
    """The one that is given, else what lies beside the model's weights. Raises ValueError."""
    given = kit.options["tokenizer"]
    if given is not None:
        return given
    from transformers import AutoTokenizer

    where = str(kit.target.model.config._name_or_path)
    try:
        return AutoTokenizer.from_pretrained(where, trust_remote_code=False)
    except Exception as error:  # damaged files raise whatever their reader raises
        raise ValueError(
            f"the CTC head of {where or type(kit.target.model).__name__} says characters, and its "
            f"tokenizer cannot be loaded ({first_line(error)}); give tokenizer="
        ) from None
