"""The proposers: classes for `speculative_config={"method": "custom_class", "model": ...}`.

vLLM constructs them with its configuration and calls `propose` after every step, with the tokens
that each row has just been given (none in a part of a prompt), the lengths of the rows and the
table of their ids. It verifies chains alone, with its own sampler; what is proposed decides how
many tokens a step brings, never which.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic

import numpy as np
from numpy.typing import NDArray

from mmspec.drafters.lookup.automaton import Automaton
from mmspec.drafters.lookup.datastore import Datastore, check_lengths
from mmspec.drafters.lookup.text_index import NGramIndex, copy_tokens
from mmspec_vllm.settings import KEY, check_count, check_flag, read_limits, read_options
from mmspec_vllm.successors import Successors
from mmspec_vllm.texts import IGNORED, R, Text, Texts, Unread

if TYPE_CHECKING:
    from vllm.config import VllmConfig


VARIABLE = "MMSPEC_VLLM_DATASTORE"


class Proposer(ABC, Generic[R]):
    """What all proposers share: the texts of the batch, and the length of a draft.

    Options come from `additional_config["mmspec"]`. Raises ValueError for unknown ones and for
    settings of the engine that a proposer cannot follow.
    """

    def __init__(self, vllm_config: VllmConfig, **defaults: Any) -> None:
        self.limits = read_limits(vllm_config)
        self.options = read_options(vllm_config, defaults)
        self.texts = Texts(self.create_index, self._is_ignored, self.limits.num_rows)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft tokens for each of B rows; none for rows in the middle of a prompt or at its end.

        Args:
            sampled_token_ids: the tokens of this step for each row.
            num_tokens_no_spec: (R,) tokens of each row, those of this step included; R >= B.
            token_ids_cpu: (R, L) ids of the rows.
            slot_mappings: not used.
        """
        rows = {
            row: token_ids_cpu[row, : num_tokens_no_spec[row]]
            for row, tokens in enumerate(sampled_token_ids)
            if tokens
        }
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        for row, text in self.texts.match(rows).items():
            # the last token that fits into the text is the target's own
            room = self.limits.text_length - len(text.tokens) - 1
            length = min(self.limits.draft_length, room)
            if length > 0:
                drafts[row] = self.draft(text, length)
        return drafts

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Part of vLLM's interface; there is no model to load."""

    @abstractmethod
    def create_index(self) -> R:
        """Create what is known of one text."""

    @abstractmethod
    def draft(self, text: Text[R], length: int) -> list[int]:
        """Propose at most `length` tokens."""

    def _is_ignored(self, token: int) -> bool:
        return token in self.limits.placeholders or not 0 <= token < self.limits.vocabulary


class PromptLookupProposer(Proposer[NGramIndex]):
    """Copies what followed the last 1 to `longest` tokens (Saxena 2023); recipe `prompt-lookup`."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config, longest=3)
        self.longest = check_count("longest", self.options["longest"])

    def create_index(self) -> NGramIndex:
        return NGramIndex(self.longest, frozenset((IGNORED,)))

    def draft(self, text: Text[NGramIndex], length: int) -> list[int]:
        return copy_tokens(text.tokens, text.index.find(text.tokens), length, (IGNORED,))


class SuffixAutomatonProposer(Proposer[Automaton]):
    """Copies after the longest repeated suffix (SAM Decoding, Hu et al. 2024); recipe `suffix`.

    Suffixes below `shortest` tokens are ignored.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config, shortest=2)
        self.shortest = check_count("shortest", self.options["shortest"])

    def create_index(self) -> Automaton:
        return Automaton((IGNORED,), self.shortest)

    def draft(self, text: Text[Automaton], length: int) -> list[int]:
        return copy_tokens(text.tokens, text.index.find(text.tokens), length, (IGNORED,))


class TokenRecyclingProposer(Proposer[Successors]):
    """Chains of the tokens that last followed each token (after Luo et al. 2024).

    The requests of the engine share a table, which later requests go on filling, as in the authors'
    code; `fresh` gives each request its own. `prompts` also records what follows what in prompts.
    See `Successors` for what vLLM's interface leaves out of the paper.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config, fresh=False, prompts=False)
        self.fresh = check_flag("fresh", self.options["fresh"])
        self.prompts = check_flag("prompts", self.options["prompts"])
        self.table: dict[int, int] = {}

    def create_index(self) -> Successors:
        return Successors({} if self.fresh else self.table, self.prompts)

    def draft(self, text: Text[Successors], length: int) -> list[int]:
        return text.index.follow(text.tokens[-1], length)


class RetrievalProposer(Proposer[Unread]):
    """Continues the last tokens as a datastore of texts does (REST, He et al. 2024); recipe `rest`.

    `datastore` is a file that `mmspec.drafters.lookup.datastore.Datastore` reads; without it the
    environment variable MMSPEC_VLLM_DATASTORE names it. Suffixes of `shortest` to `longest` tokens
    are looked up.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config, datastore=None, longest=16, shortest=2)
        self.longest = check_count("longest", self.options["longest"])
        self.shortest = check_count("shortest", self.options["shortest"])
        check_lengths(self.limits.draft_length, self.longest, self.shortest)
        file = self.options["datastore"] or os.environ.get(VARIABLE)
        if not isinstance(file, str):
            raise ValueError(
                f"datastore={file!r} must be the path of a file; set it in "
                f"additional_config={{{KEY!r}: {{'datastore': ...}}}} or in {VARIABLE}"
            )
        self.datastore = Datastore.load(file)
        self.datastore.check_vocabulary(self.limits.vocabulary)

    def create_index(self) -> Unread:
        return Unread()

    def draft(self, text: Text[Unread], length: int) -> list[int]:
        last = text.tokens[-self.longest :]
        found = self.datastore.continuation(last, length, self.longest, self.shortest)
        return copy_tokens(found, 0, len(found), self.limits.placeholders)
