"""The token that last followed each token: token recycling from observed text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmspec_vllm.texts import IGNORED


@dataclass
class Successors:
    """Adds the transitions of one text to a table, which other texts may share.

    Token recycling (Luo et al. 2024) keeps the target's best candidates after every token that was
    scored, rejected ones included. A custom proposer gets no logits, so the table has the tokens
    that were output: of a chain, which takes the best candidate alone, this is the table of the
    paper in greedy decoding, but for what follows rejected tokens. The tokens at the first reading
    are the prompt, but for the last one; they count where `prompts` is set.
    """

    table: dict[int, int]  # at most one entry per token of the vocabulary
    prompts: bool = False
    num_read: int = 0

    def read(self, text: Sequence[int]) -> None:
        """Add the transitions since the last call; the later of two counts."""
        start = self.num_read
        if not start:
            start = 1 if self.prompts else len(text) - 1
        for place in range(max(start, 1), len(text)):
            if text[place - 1] != IGNORED and text[place] != IGNORED:
                self.table[text[place - 1]] = text[place]
        self.num_read = len(text)

    def follow(self, token: int, length: int) -> list[int]:
        """The chain of at most `length` tokens that follows `token`."""
        chain: list[int] = []
        while len(chain) < length and token in self.table:
            token = self.table[token]
            chain.append(token)
        return chain
