"""Drafting with the CTC head of a speech recogniser's encoder."""

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
from mmspec.targets.readers.reader import CtcOutput

Spelling = Callable[[Sequence[int]], list[int]]  # labels of the encoder -> tokens of the target


@dataclass(frozen=True)
class CtcTranscript:
    """The CTC transcript of each row, in tokens of the target with its end token."""

    tokens: list[list[int]]
    unsure: torch.Tensor  # (B,) nats; infinite for an empty transcript


class EncoderDrafter(Drafter):
    """Drafts the CTC output of a recogniser's encoder, including the first token."""

    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET,)
    required_features: ClassVar[frozenset[str]] = frozenset({"ctc"})
    drafts_first_token: ClassVar[bool] = True
    sees: ClassVar[str] = "encoder"

    def encoder_output(self, context: Any) -> CtcOutput | None:
        """The encoder's CTC output, if any. Raises ValueError for several sounds per row."""
        encoder_output: CtcOutput | None = context.shared["ctc"]
        if encoder_output is not None and len(encoder_output.log_probs) != context.batch:
            raise ValueError(
                f"{len(encoder_output.log_probs)} sounds in {context.batch} rows cannot be "
                "distinguished; give one sound per row"
            )
        return encoder_output


@dataclass(frozen=True)
class CtcDraft(EncoderDrafter):
    """The collapsed greedy path of the encoder's CTC head, once per request.

    Proposes the first token and the end token as well; rejected positions are left to the target. A
    draft carries the uncertainty of the path: the highest entropy of a frame.
    """

    spelling: Spelling
    end: int  # the token that ends a text

    def begin(self, context: Any) -> CtcTranscript:
        """Transcribe the encoder output. Raises ValueError for several sounds per row."""
        encoder_output = self.encoder_output(context)
        if encoder_output is None:
            return CtcTranscript(
                [[] for _ in range(context.batch)], torch.full((context.batch,), torch.inf)
            )
        paths = greedy(encoder_output.log_probs, encoder_output.mask, encoder_output.blank)
        texts = [self.spelling([run.label for run in path]) for path in paths]
        unsure = uncertainty(encoder_output.log_probs, encoder_output.mask)
        empty = torch.tensor([not text for text in texts], device=unsure.device)
        max_tokens = context.request.max_new_tokens
        tokens = [[*text, self.end][:max_tokens] if text else [] for text in texts]
        return CtcTranscript(tokens, unsure.masked_fill(empty, torch.inf))

    def propose(self, context: Any, state: CtcTranscript) -> Draft:
        fresh = [
            not (context.num_generated(row) or context.finished[row])
            for row in range(context.batch)
        ]
        rows = [text if new else [] for text, new in zip(state.tokens, fresh, strict=True)]
        width = max(map(len, rows))
        if not width:
            nothing: Draft = context.empty_draft()
            return nothing
        device = context.device
        mask = torch.tensor([[at < len(row) for at in range(width)] for row in rows], device=device)
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
        draft = Draft.chain(tokens, Kind.DET, mask=mask)
        return replace(draft, extras=Uncertainty(state.unsure))


@dataclass(frozen=True)
class WholeText:
    """A whole text is drafted at once."""

    description: ClassVar[str] = "whole text at once"
    walk: ClassVar[str] = LINEAR


def ctc_head(kit: Kit) -> Drafter:
    """The greedy path of the target's own CTC head, in its tokens.

    Raises ValueError for another draft shape.
    """
    check_shape(kit)
    return CtcDraft(spelling(kit), end_of(kit))


def check_shape(kit: Kit) -> None:
    """Refuse a draft of another shape than a whole text. Raises ValueError."""
    if not isinstance(kit.shape, WholeText):
        raise ValueError("a CTC head drafts a whole text at once; do not give length= or tree=")


def end_of(kit: Kit) -> int:
    """The token that ends a text. Raises ValueError where there is none."""
    ends = kit.target.model.generation_config.eos_token_id
    ends = kit.target.config.eos_token_id if ends is None else ends
    if ends is None:
        raise ValueError(
            f"{type(kit.target.model).__name__} has no eos_token_id, so a draft cannot mark where "
            "a text ends; set it in model.generation_config"
        )
    return int(ends[0] if isinstance(ends, list | tuple) else ends)


def spelling(kit: Kit) -> Spelling:
    """Return the function from CTC labels to tokens.

    A head with one label more than the target has tokens predicts tokens (label i is token i - 1);
    others predict characters, label i being code point i, and their text is tokenized. Raises
    ValueError where there is no tokenizer.
    """
    head = kit.target.family.ctc.head(kit.target.model)
    if head.out_features == kit.target.vocabulary + 1:
        return lambda labels: [label - 1 for label in labels]
    tokenizer = tokenizer_of(kit)

    def spell(labels: Sequence[int]) -> list[int]:
        text = "".join(map(chr, labels)).strip()
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        return ids

    return spell


def labels_of(kit: Kit) -> Callable[[int], Sequence[int]]:
    """Return the function from a token to its CTC labels; empty for tokens without audio."""
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
    """The tokenizer given, else the one in the model's folder. Raises ValueError."""
    given = kit.options["tokenizer"]
    if given is not None:
        return given
    from transformers import AutoTokenizer

    where = str(kit.target.model.config._name_or_path)
    try:
        return AutoTokenizer.from_pretrained(where, trust_remote_code=False)
    except Exception as error:  # damaged files raise whatever their reader raises
        raise ValueError(
            f"the CTC head of {where or type(kit.target.model).__name__} predicts characters, and "
            f"its tokenizer cannot be loaded ({first_line(error)}); give tokenizer="
        ) from None
