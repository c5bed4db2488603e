"""What a model finds likely after each single token, and stores of continuations by trust."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmspec.drafters.lookup.branches import BranchedLookup, RowGuesses, make_branches
from mmspec.drafters.lookup.datastore import Datastore
from mmspec.errors import check_number
from mmspec.recipe import Kit

NAME = "bigrams"


@dataclass(frozen=True, eq=False)
class BigramTable:
    """The `width` best next tokens after each token of a vocabulary, the best first."""

    tokens: Tensor  # (V, width) int32, on the CPU

    @classmethod
    def of(cls, model: Any, width: int = 10, batch: int = 256) -> BigramTable:
        """Read every token of the vocabulary alone, `batch` of them in one forward.

        Needs a causal model of text tokens, which may read images too; a row is the best of
        p(. | token), without any other context. Raises ValueError for other models and for a width
        beyond the vocabulary.
        """
        for name, value in (("width", width), ("batch", batch)):
            check_number(name, value, 1, whole=True, example=10)
        embeddings = model.get_input_embeddings()
        if model.config.is_encoder_decoder or not model.can_generate():
            raise ValueError(
                f"{type(model).__name__} does not continue a text of tokens, so it has no table of "
                "next tokens; give a causal language model"
            )
        parts = []
        for start in range(0, embeddings.num_embeddings, batch):
            end = min(start + batch, embeddings.num_embeddings)
            ids = torch.arange(start, end, device=embeddings.weight.device)[:, None]
            with torch.no_grad():
                logits = model(input_ids=ids, use_cache=False).logits[:, -1]
            if width > logits.shape[-1]:
                raise ValueError(
                    f"width={width} is more than the {logits.shape[-1]} tokens of the vocabulary; "
                    "give fewer"
                )
            parts.append(logits.topk(width, -1).indices.to("cpu", torch.int32))
        return cls(torch.cat(parts))

    def following(self, token: int) -> list[int]:
        """The tokens after one, the best first; none for an id outside the table."""
        known = 0 <= token < len(self.tokens)
        return self.tokens[token].tolist() if known else []

    def chain(self, token: int, length: int) -> list[int]:
        """The best token after one, the best after that, and so on."""
        found: list[int] = []
        for _ in range(length):
            best = self.following(token)[:1]
            if not best:
                break
            token = best[0]
            found.append(token)
        return found

    def check_vocabulary(self, vocabulary: int) -> None:
        """Raises ValueError for ids that a target with `vocabulary` ids does not have."""
        largest = int(self.tokens.max())
        if largest >= vocabulary:
            raise ValueError(
                f"the table has token id {largest}, but the target's vocabulary has {vocabulary}; "
                "build it from the target, by BigramTable.of(model)"
            )

    def save(self, path: str | Path) -> None:
        """Write the table as safetensors."""
        save_file({NAME: self.tokens}, path)

    @classmethod
    def load(cls, path: str | Path) -> BigramTable:
        """Read what `save` wrote. Raises ValueError for other content."""
        try:
            tokens = load_file(path)[NAME]
            if tokens.dim() != 2 or tokens.dtype != torch.int32 or not tokens.numel():
                raise ValueError("no table of ids")
            if int(tokens.min()) < 0:
                raise ValueError("ids below 0")
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ValueError(
                f"{path} is not a table of next tokens ({type(error).__name__}); give a file "
                "written by BigramTable.save"
            ) from None
        return cls(tokens)


@dataclass(frozen=True)
class TableGuesses:
    """The model's own next tokens after the last one (N-Grammys, Stewart et al. 2024)."""

    table: BigramTable | None
    reads_scores: bool = False

    def tokens(self, row: RowGuesses, text: list[int]) -> list[int]:
        return [] if self.table is None else self.table.following(text[-1])


@dataclass(frozen=True)
class StoredContinuations:
    """Continuations of what the text has not: of a datastore, else by the table, token by token."""

    datastore: Datastore | None
    table: BigramTable | None

    def __call__(self, text: Sequence[int], length: int) -> list[int]:
        found = [] if self.datastore is None else self.datastore.continuation(text, length)
        if not found and self.table is not None:
            found = self.table.chain(text[-1], length)
        return found


def branches_of_table(kit: Kit) -> BranchedLookup:
    """Continuations of the table's candidates, from stores in the order of trust.

    Raises ValueError for a table or a datastore of another vocabulary.
    """
    table: BigramTable | None = kit.load_option("table", BigramTable)
    datastore: Datastore | None = kit.load_option("datastore", Datastore)
    for store in (table, datastore):
        if store is not None:
            store.check_vocabulary(kit.target.vocabulary)
    return make_branches(kit, TableGuesses(table), StoredContinuations(datastore, table))
