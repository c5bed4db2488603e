"""A table of frequent continuations of the last tokens, built from transcripts of a domain.

Token Map Drafting (arXiv 2507.21522, 2025): speech in a fixed setting (counter, car) repeats
itself, and a table lookup is cheaper than any draft model.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.drafters.lengths.length import Length
from mmspec.drafters.lookup.prompt_lookup import length_of, pad_chains
from mmspec.errors import check_is_file, parse_json
from mmspec.recipe import Kit
from mmspec.targets.tokens.context import Context

Key = tuple[int, ...]


@dataclass(frozen=True)
class TokenMap:
    """Continuations of the last 1 to `longest` tokens; longer keys are looked up first."""

    longest: int
    table: Mapping[Key, Key]

    @classmethod
    def of(
        cls,
        texts: Iterable[Sequence[int]],
        longest: int = 3,
        max_tokens: int = 8,
        min_count: int = 2,
        share: float = 0.5,
    ) -> TokenMap:
        """Build the table from transcripts of token ids.

        A continuation has at most `max_tokens` tokens; it ends before the first that followed fewer
        than `min_count` times, or in less than `share` of the key's occurrences. Raises ValueError
        for values that leave nothing.
        """
        if min(longest, max_tokens, min_count) < 1 or not 0 < share <= 1:
            raise ValueError(
                f"longest={longest}, max_tokens={max_tokens}, min_count={min_count}, share={share} "
                "leave nothing; give whole numbers from 1 on, and a share within (0, 1]"
            )
        places: dict[Key, list[Sequence[int]]] = defaultdict(list)
        for text in texts:
            tokens = list(text)
            for at in range(1, len(tokens)):
                rest = tokens[at : at + max_tokens]
                for size in range(1, min(longest, at) + 1):
                    places[tuple(tokens[at - size : at])].append(rest)
        prefix = {
            key: _frequent_continuation(rests, min_count, share) for key, rests in places.items()
        }
        return cls(longest, {key: default for key, default in prefix.items() if default})

    def find(self, text: Sequence[int]) -> Key:
        """The continuation of a text; empty where none is known."""
        for size in range(min(self.longest, len(text)), 0, -1):
            found = self.table.get(tuple(text[len(text) - size :]))
            if found is not None:
                return found
        return ()

    def save(self, path: str | Path) -> None:
        """Write the table as JSON."""
        rows = [[list(key), list(rest)] for key, rest in self.table.items()]
        content = {"longest": self.longest, "table": rows}
        Path(path).write_text(json.dumps(content), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> TokenMap:
        """Read what `save` wrote. Raises ValueError for other content."""
        try:
            check_is_file(Path(path))
            content = parse_json(Path(path).read_text(encoding="utf-8"))
            table = {tuple(map(int, key)): tuple(map(int, rest)) for key, rest in content["table"]}
            return cls(int(content["longest"]), table)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is not a token map ({type(error).__name__}); give a file written by "
                "TokenMap.save"
            ) from None


class TokenMapDrafter(Drafter):
    """Drafts the continuation in the table, up to the draft length.

    Deterministic proposals: exact with every lossless verifier. Without an entry, a plain step.
    """

    kinds: tuple[Kind, ...] = (Kind.DET,)

    def __init__(self, token_map: TokenMap, length: Length) -> None:
        self.token_map, self.length = token_map, length

    def begin(self, context: Context) -> Any:
        return self.length.begin()

    def propose(self, context: Context, state: Any) -> Draft:
        budget = self.length.budget(state, context)
        rows = zip(context.history, context.finished, strict=True)
        found = [() if done else self.token_map.find(text)[:budget] for text, done in rows]
        return pad_chains(context, found)

    def observe(
        self, context: Context, state: Any, draft: Draft, scores: Scores, round_: Round
    ) -> Any:
        return self.length.observe(state, round_)


def token_map(kit: Kit) -> Drafter:
    """A table built from transcripts. Raises ValueError for other objects."""
    given: TokenMap | None = kit.load_option("map", TokenMap)
    return TokenMapDrafter(TokenMap(1, {}) if given is None else given, length_of(kit))


def _frequent_continuation(rests: Sequence[Sequence[int]], min_count: int, share: float) -> Key:
    """The most frequent continuation, as far as it is frequent enough."""
    prefix: list[int] = []
    total = len(rests)
    while rests:
        counts = Counter(rest[len(prefix)] for rest in rests if len(rest) > len(prefix))
        if not counts:
            break
        token, times = counts.most_common(1)[0]
        if times < min_count or times < share * total:
            break
        prefix.append(token)
        rests = [one for one in rests if len(one) >= len(prefix) and one[len(prefix) - 1] == token]
    return tuple(prefix)
